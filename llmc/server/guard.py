"""ASGI middleware around every route: request ids, host check, API keys, draining, access log.

Written directly on ASGI, so that streams pass through untouched. Paths are taken from
scope["path"], which no Host header can change.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.frontend.turns import CALLER
from llmc.logs import REQUEST_ID
from llmc.server.errors import (
    ApiError,
    as_api_error,
    code_of,
    error_response,
    is_of_anthropic,
)
from llmc.server.page import DOCS, FILES, PAGE
from llmc.server.settings import ServerSettings

access = logging.getLogger("llmc.access")

PUBLIC_PATHS = frozenset({"/health", "/v1/health", "/ready", "/health_generate", "/ping"})
ADMIN_PATHS = frozenset(
    {
        *("/load", "/server_info", "/start_profile", "/stop_profile"),
        *("/reset_prefix_cache", "/abort_requests", "/sleep", "/wake_up", "/is_sleeping"),
    }
)
UNCOUNTED_PATHS = PUBLIC_PATHS | {"/metrics", "/load", "/version"}  # probes
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
CLIENT_CLOSED = 499  # in the log only, by convention (nginx)
# a response's scope, status and seconds
OnAnswer = Callable[[Scope, int, float], None]
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """Decides which requests are admitted, and adds the request id to every response."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServerSettings,
        is_draining: Callable[[], bool],
        on_answer: OnAnswer | None = None,
    ) -> None:
        self._app = app
        self._on_answer = on_answer
        self._admin_key = (
            hashlib.sha256(settings.admin_api_key.encode()).digest()
            if settings.admin_api_key is not None
            else None
        )
        self._settings = settings
        self._is_draining = is_draining
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._hosts = LOOPBACK_HOSTS | {
            settings.host.lower(),
            *map(str.lower, settings.allowed_hosts),
        }
        # Without keys, a loopback server is open to programs on this machine. A web page open in
        # a browser on this machine must not count as one (DNS rebinding, cross-site requests).
        self._origins = {origin.lower().encode() for origin in settings.allowed_origins}
        self._check_host = not self._keys and is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith("/v1/"):  # clients that join a base URL with a slash too many
            scope["path"] = scope["path"].rstrip("/")
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        token = REQUEST_ID.set(request_id.decode())
        outcome = _Outcome()

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome.status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id)]
                if is_of_anthropic(scope):
                    headers.append((b"request-id", request_id))
                if self._is_draining():
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        started = time.monotonic()
        try:
            await self._pass(scope, receive, stamped, outcome)
        finally:
            status = scope["state"].get("log_status", outcome.status) or CLIENT_CLOSED
            seconds = time.monotonic() - started
            if self._settings.access_log and scope["path"] not in PUBLIC_PATHS:
                _log(scope, status, seconds)
            if self._on_answer is not None and scope["path"] not in UNCOUNTED_PATHS:
                self._on_answer(scope, status, seconds)
            REQUEST_ID.reset(token)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, outcome: _Outcome) -> None:
        try:
            self._admit(scope)
            CALLER.set(_caller(scope))
            await self._app(scope, receive, send)
        except Exception as exc:
            if outcome.status:  # too late for a status: the connection is closed
                raise
            error = scope["state"]["error"] = as_api_error(exc)
            request_id = scope["state"]["request_id"]
            await error_response(error, scope, request_id)(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        path = scope["path"]
        self._check_size(scope)
        if self._check_host:
            self._check_names(scope)
        if path in PUBLIC_PATHS or path in (PAGE, DOCS) or path.startswith(FILES):
            return
        if path in ADMIN_PATHS:
            self._admit_operator(scope)
            return
        if self._keys:
            key = self._find_key(scope, self._keys)
            if key is None:
                raise ApiError(
                    401, "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY"
                )
            scope["state"]["caller"] = key.hex()
            if self._settings.salt_by_api_key:
                scope["state"]["cache_owner"] = key.hex()
        if self._is_draining():
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    def _admit_operator(self, scope: Scope) -> None:
        """The operator's routes have a separate key, and are disabled without one."""
        if self._admin_key is None:
            raise ApiError(
                404,
                f"{scope['path']} is for the operator; start the server with --admin-api-key",
                code="admin_api_disabled",
            )
        if self._find_key(scope, [self._admin_key]) is None:
            if self._find_key(scope, self._keys) is not None:
                raise ApiError(
                    403,
                    f"{scope['path']} needs the key of --admin-api-key; this is a client's key",
                    code="admin_api_key_needed",
                )
            raise ApiError(
                401, "the operator's key is required: Authorization: Bearer KEY, or x-api-key: KEY"
            )

    def _check_size(self, scope: Scope) -> None:
        """Check the size of the headers: h11 limits it only while they are incomplete."""
        settings = self._settings
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > settings.max_headers or size > settings.max_header_bytes:
            raise ApiError(
                431,
                f"{len(scope['headers'])} headers of {size} bytes; the limits are "
                f"{settings.max_headers} and {settings.max_header_bytes}",
            )

    @staticmethod
    def _find_key(scope: Scope, ours: Iterable[bytes]) -> bytes | None:
        """The digest of the key that was sent, if it is one of `ours`."""
        given = [value for name, value in scope["headers"] if name == b"x-api-key"]
        for value in _values(scope, b"authorization"):
            kind, _, key = value.partition(b" ")
            if kind.lower() == b"bearer":
                given.append(key.strip())
        # All hashes, of equal length, are compared, so that timing reveals nothing about the keys.
        found = None
        for key in given:
            digest = hashlib.sha256(key).digest()
            for known in ours:
                if hmac.compare_digest(digest, known):
                    found = known
        return found

    def _check_names(self, scope: Scope) -> None:
        for value in _values(scope, b"host"):
            if _hostname(value) not in self._hosts:
                raise ApiError(
                    403,
                    f"Host {_shown(value)} is not served here; this server listens on "
                    f"{self._settings.host} without API keys (see --allowed-host and --api-key)",
                )
        for value in _values(scope, b"origin"):
            _, _, host = value.partition(b"://")
            is_allowed = b"*" in self._origins or value.lower() in self._origins
            if not is_allowed and _hostname(host) not in self._hosts:
                raise ApiError(
                    403,
                    f"requests from the web page {_shown(value)} are not allowed "
                    "(see --allowed-origin)",
                )


class _Outcome:
    """The status that was sent; 0 until then."""

    status = 0


def is_loopback(host: str) -> bool:
    return host.lower() in ("localhost", "::1") or host.startswith("127.")


def _values(scope: Scope, wanted: bytes) -> Iterable[bytes]:
    return (value for name, value in scope["headers"] if name == wanted)


def _caller(scope: Scope) -> str:
    """Who sends the request: its key, or its address."""
    host, _ = scope.get("client") or ("", 0)
    return str(scope["state"].get("caller", host))


def _hostname(value: bytes) -> str:
    """Host without its port: `localhost:8000` -> localhost, `[::1]:8000` -> [::1]."""
    name = value.decode("latin-1").strip().lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:80])


def _request_id(scope: Scope) -> bytes:
    """The client's id if it is short and plain, otherwise a new one."""
    for value in _values(scope, b"x-request-id"):
        if _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()


def _log(scope: Scope, status: int, seconds: float) -> None:
    """Log one line, with an error's code and parameter. The formatter adds the request's id."""
    fields = {
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(seconds, 6),
    }
    why = ""
    error: ApiError | None = scope["state"].get("error")
    if error is not None:
        fields["code"] = code_of(error)
        why = f" code={fields['code']}"
        if error.param is not None:
            fields["param"] = error.param[:200]
            why += f" param={_one_line(fields['param'])}"
    access.info(
        "%s %s %d %.3fs%s",
        scope["method"],
        _one_line(scope["path"][:200]),
        status,
        seconds,
        why,
        extra={"fields": fields},
    )


def _one_line(text: str) -> str:
    """Escape control characters, which paths and field names may contain, to keep one line."""
    return repr(text)[1:-1]
