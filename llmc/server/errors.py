"""Formats every error as its protocol expects it, wherever it was raised.

others      {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
Anthropic   {"type": "error", "error": {"type": ..., "message": ...}}             /v1/messages;
                                             any path, with the header anthropic-version
Ollama      {"error": ...}                                                        /api
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from llmc.errors import (
    EngineAsleepError,
    EngineDeadError,
    EngineShutDownError,
    InvalidRequestError,
    QueueFullError,
)

log = logging.getLogger(__name__)

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
MAX_MESSAGE = 1000  # characters: a message may quote the user's input
RETRY_AFTER_S = "1"

# status -> (type, code), the default if the error has no code
STATUS_NAMES: dict[int, tuple[str, str]] = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "host_not_allowed"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "body_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    431: ("invalid_request_error", "headers_too_large"),
    429: ("rate_limit_error", "queue_full"),
    500: ("server_error", "internal_error"),
    501: ("invalid_request_error", "not_implemented"),
    503: ("server_error", "unavailable"),
}
# The types that Anthropic's clients know.
ANTHROPIC_TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


# Paths of other servers -> the path for the same purpose.
FOREIGN_PATHS: Mapping[str, str] = {
    "/slots": "/metrics",
    "/lora-adapters": "/v1/models",
    "/generate_stream": "/v1/completions",
    "/encode": "/v1/embeddings",
    "/embed": "/v1/embeddings",
    "/info": "/v1/models",
    "/get_server_info": "/server_info",
    "/flush_cache": "/reset_prefix_cache",
    "/v1/complete": "/v1/messages",
    "/v1/edits": "/v1/chat/completions",
}
_IN_TEXT = "context_length_exceeded"
INVALID_HTTP = "invalid_http"
CALL_ABORTED = "call_aborted"


class ApiError(Exception):
    """An error response, raised by a route and turned into JSON here."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def shown(self) -> str:
        """The message, truncated. Some clients search it for one particular code."""
        text = self.message
        text = text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."
        return f"{text} ({_IN_TEXT})" if self.code == _IN_TEXT else text


def error_body(error: ApiError) -> dict[str, Any]:
    kind, _ = STATUS_NAMES.get(error.status, STATUS_NAMES[500])
    return {
        "error": {
            "message": error.shown,
            "type": kind,
            "param": error.param,
            "code": code_of(error),
        }
    }


def code_of(error: ApiError) -> str:
    """The code that identifies an error for programs and in the log."""
    return error.code or STATUS_NAMES.get(error.status, STATUS_NAMES[500])[1]


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    # Clients compact their conversation if they find these words.
    about = "prompt is too long: " if error.code == _IN_TEXT else ""
    shown: dict[str, Any] = {"type": kind, "message": about + error.shown}
    if error.param == "thread":  # the SDK's tool runner then sends whole conversations
        shown["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": shown}


def ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": error.shown}


def dump_json(value: Any) -> bytes:
    """Compact UTF-8 JSON. NaN is not valid JSON, so it fails here rather than at the client."""
    # A lone surrogate can't be encoded as UTF-8. An error message that quotes input must not fail.
    return _ENCODER.encode(value).encode("utf-8", errors="replace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump_json(value), status, headers, media_type="application/json")


def is_of_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether Anthropic's protocol applies to an ASGI scope: its clients name its version on every
    path, also on one that is OpenAI's too (/v1/models) or that does not exist."""
    path: str = scope["path"]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def error_response(
    error: ApiError, scope: Mapping[str, Any] | None, request_id: str | None = None
) -> Response:
    """The response for an error of the request with this ASGI scope; None: it could not be read.
    The body has `request_id` if the protocol has a field for it."""
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = RETRY_AFTER_S
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413, 415, 431, 501) or error.code == INVALID_HTTP:
        headers["connection"] = "close"  # the rest of the body is not read
    if error.code == CALL_ABORTED:
        headers["x-should-retry"] = "false"  # SDKs would repeat what the operator has ended
    write = error_body
    if scope is not None and is_of_anthropic(scope):
        write = anthropic_error
    elif scope is not None and scope["path"].startswith("/api/"):
        write = ollama_error
    body = write(error)
    if request_id is not None and write is not ollama_error:
        body["request_id"] = request_id
    return json_response(body, error.status, headers)


def as_api_error(exc: Exception, *, logs: bool = True) -> ApiError:
    """The ApiError for `exc`. Clients get no details of unexpected errors, which are logged unless
    another call of this function logs the same error."""
    match exc:
        case ApiError():
            return exc
        case InvalidRequestError():
            return ApiError(400, str(exc), param=exc.param, code=exc.code)
        case QueueFullError():
            return ApiError(429, str(exc))
        case EngineAsleepError():
            return ApiError(503, str(exc), code="engine_asleep")
        case EngineShutDownError():
            return ApiError(503, str(exc), code="shutting_down")
        case EngineDeadError():
            return ApiError(503, str(exc), code="engine_dead")
        case ValidationError():
            return _of_validation(exc)
        case OSError() if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            if logs:
                log.error("no room on the disk: %s", exc)
            return ApiError(503, "the server's disk is full; delete files, or try again later")
    if logs:
        log.error("unexpected error", exc_info=exc)
    return ApiError(500, "the server failed on this request; its log has the details")


async def unknown_route(request: Request, exc: Exception) -> Response:
    """404 and 405, which the router itself raises."""
    assert isinstance(exc, HTTPException), "registered for HTTPException only"
    what = {404: "no such path", 405: "this path takes another method"}
    message = what.get(exc.status_code, str(exc.detail))
    asked = f"{request.method} {request.scope['path']!r:.200}"
    if exc.status_code == 404 and (near := _meant(request)) is not None:
        asked += f"; did you mean {near}?"
    error = request.state.error = ApiError(exc.status_code, f"{message}: {asked}")
    response = error_response(error, request.scope, request.state.request_id)
    if exc.status_code == 405:  # the methods of all routes of this path; the router names one's
        routes = request.app.routes
        found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        same = [route for route in found if route.path == found[0].path]  # not a {name}
        response.headers["allow"] = ", ".join(sorted(set().union(*(r.methods for r in same))))
    return response


def _meant(request: Request) -> str | None:
    """The path of a client whose base URL has one part too many or too few, or that knows another
    server's path."""
    path = request.scope["path"].rstrip("/")
    if path in FOREIGN_PATHS:
        return FOREIGN_PATHS[path]
    paths = [route.path for route in request.app.routes if len(route.path) > 1]
    near = (one for one in paths if path.endswith(one) or one == f"/v1{path}")
    return max(near, key=len, default=None)


def _of_validation(exc: ValidationError) -> ApiError:
    """The first of pydantic's errors, with the field's path in OpenAI's notation."""
    errors = exc.errors(include_url=False, include_context=False)
    first = errors[0]
    param = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"unknown parameter {param!r}", param=param, code="unsupported_parameter"
        )
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    message = f"{param or 'body'}: {first['msg']}, got {_brief(first.get('input'))}{more}"
    code = "missing_field" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, message, param=param or None, code=code)


def _path(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> messages[0].content; names of union members are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
