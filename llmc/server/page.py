"""GET /: a page to chat with the model and to watch the engine; GET /docs: one about the API.

Both are made of files in web/; /docs is drawn from /openapi.json.

Its files hold no secrets and need no key; what they call does. The policy that they are sent with
(https://www.w3.org/TR/CSP3/) allows nothing from elsewhere, no script or style in the markup, and
no string to become markup (Trusted Types): a model's text can't do anything in the browser.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from llmc.server.errors import ApiError

PAGE = "/"
DOCS = "/docs"
FILES = "/ui/"  # where the page's other files are

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """The page."""
    return _answer("index.html")


async def docs(request: Request) -> Response:
    """The API, described for people."""
    return _answer("docs.html")


async def page_file(request: Request) -> Response:
    """A script or the style of the page."""
    name = request.path_params["name"]
    if name not in _files():
        raise ApiError(404, f"there is no file {name[:80]!r} of the page")
    return _answer(name)


def _answer(name: str) -> Response:
    media_type, body = _files()[name]
    return Response(body, media_type=media_type, headers=HEADERS)


@cache
def _files() -> dict[str, tuple[str, bytes]]:
    """Type and content by name, so that no path of a request ever reaches the file system."""
    found = {}
    for file in (files("llmc.server") / "web").iterdir():
        media_type = _TYPES.get(file.name[file.name.rfind(".") :])
        if media_type is not None:
            found[file.name] = (media_type, file.read_bytes())
    return found
