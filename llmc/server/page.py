"""GET /: a page to chat with the model and to watch the engine; GET /docs: one about the API.

Both consist of files in web/; /docs is rendered from /openapi.json.

The files contain no secrets and need no key; the routes that they call do. They are served with a
content security policy (https://www.w3.org/TR/CSP3/) that allows nothing from other origins, no
inline script or style, and no string as markup (Trusted Types), so a model's output can't run
anything in the browser.
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


async def running(request: Request) -> Response:
    """What is there without the page: Ollama's client asks for it before each command."""
    return Response("llmc is running", media_type="text/plain")


async def docs(request: Request) -> Response:
    """The API documentation page."""
    return _answer("docs.html")


async def page_file(request: Request) -> Response:
    """A script or stylesheet of the page."""
    name = request.path_params["name"]
    if name not in _files():
        raise ApiError(404, f"the page has no file {name[:80]!r}")
    return _answer(name)


def _answer(name: str) -> Response:
    media_type, body = _files()[name]
    return Response(body, media_type=media_type, headers=HEADERS)


@cache
def _files() -> dict[str, tuple[str, bytes]]:
    """Type and content by name, so that a request's path never reaches the file system."""
    found = {}
    for file in (files("llmc.server") / "web").iterdir():
        media_type = _TYPES.get(file.name[file.name.rfind(".") :])
        if media_type is not None:
            found[file.name] = (media_type, file.read_bytes())
    return found
