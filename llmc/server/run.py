"""From settings to a listening server and back to a clean exit.

`bind_socket` runs before the model is loaded, so that a taken port is reported at once. The first
SIGTERM or SIGINT starts draining: the port stays open and answers 503, running requests finish, and
the exit code is 0. A second signal drops running requests. If the engine is permanently dead, the
server exits with EngineDeadError.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import socket
import ssl
import sys
import termios
import uuid
from array import array
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmc.async_llm import AsyncLLM
from llmc.errors import ConfigError, EngineDeadError
from llmc.server.batch_runner import BatchRunner
from llmc.server.errors import INVALID_HTTP, ApiError, error_response
from llmc.server.settings import ServerSettings
from llmc.server.throughput import log_throughput

if TYPE_CHECKING:  # importing these reads the environment, which --api-workers must set first
    from llmc.server.adapters import Adapters
    from llmc.server.model_manager import ModelManager
    from llmc.server.tracing import Tracer

log = logging.getLogger(__name__)

BACKLOG = 2048  # connections waiting to be accepted
READERS_S = 2  # after draining, for slow readers to receive the ends of their responses
HEAD_TIMEOUT_S = 30.0  # from opening, or from the last response, to the end of a request's headers


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket on host:port (0: any free port), or ConfigError naming the process that holds it."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"can't listen on port {port}; ports are 0 to 65535 (0: any free one)")
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except (OSError, UnicodeError, OverflowError) as exc:
        raise ConfigError(f"can't listen on {host}:{port}: {exc}; check --host") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # Allows reusing a port with connections in TIME_WAIT, but not one with a listener.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as exc:
        sock.close()
        raise _cannot_bind(host, port, exc) from None
    sock.setblocking(False)
    return sock


def serve(
    app: Starlette,
    settings: ServerSettings,
    sock: socket.socket | None = None,
    *,
    on_ready: Callable[[], None] | None = None,
    companions: Companions | None = None,
) -> None:
    """Serve until a signal. `on_ready` is called once requests are accepted."""
    server = Server(app, settings, on_ready=on_ready, companions=companions)
    server.run(sockets=[sock or bind_socket(settings.host, settings.port)])
    server.check()


def check_certificates(settings: ServerSettings) -> None:
    """Raises ConfigError if the HTTPS files can't be used; called before a model is loaded."""
    if not settings.ssl_certfile:
        return

    def no_password() -> str:
        file = settings.ssl_keyfile or settings.ssl_certfile
        raise ConfigError(f"the key in {file} has a password, which is not supported; remove it")

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, no_password)
        if settings.ssl_ca_certs:
            context.load_verify_locations(settings.ssl_ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = [settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs]
        named = ", ".join(file for file in files if file)
        raise ConfigError(f"can't serve HTTPS with {named}: {_tls_reason(error)}") from None


def _tls_reason(error: OSError | ValueError) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error)
    if error.reason in (None, "NO_START_LINE"):  # OpenSSL does not say which file, or what is in it
        return "a PEM file lacks the certificate or the private key that it must contain"
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    return str(error)


class Companions(Protocol):
    """Other processes that serve on the same socket (server/workers.py)."""

    def end(self) -> None:
        """Drain, as after a signal. The second call drops running requests."""

    async def wait(self, timeout_s: float) -> bool:
        """Wait for them to exit; returns whether all did in time."""


class Server(uvicorn.Server):
    """uvicorn's server with draining and our limits."""

    _is_first = True  # of the processes that serve an engine; checks adapters and logs throughput

    def __init__(
        self,
        app: Starlette,
        settings: ServerSettings,
        *,
        on_ready: Callable[[], None] | None = None,
        companions: Companions | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=partial(Connection, stalled_reader_s=settings.stalled_reader_s),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # the Guard writes it
            server_header=False,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
            h11_max_incomplete_event_size=settings.max_header_bytes,
            # If other processes accept from the same socket, accept one connection at a time, so
            # that they are distributed evenly.
            backlog=BACKLOG if settings.api_workers == 1 else 1,
            timeout_keep_alive=settings.idle_connection_s,
            timeout_graceful_shutdown=READERS_S
            + 2,  # `shutdown` has closed all connections by then
        )
        super().__init__(config)
        self._llm: AsyncLLM | ModelManager = app.state.llm
        self._adapters: Adapters | None = app.state.adapters
        self._tracer: Tracer | None = app.state.tracer
        self._settings = settings
        self._batches: BatchRunner | None = app.state.batch_runner
        self._on_ready = on_ready
        self._companions = companions
        self._num_signals = 0
        self._drained: asyncio.Task[None] | None = None
        self._throughput: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._llm.open()
        if self._is_first and self._adapters is not None:
            await self._adapters.check()
        try:
            await super().startup(sockets)
        except OSError as exc:  # another server took the port while the model was loading
            raise _cannot_bind(self._settings.host, self._settings.port, exc) from None
        for sock in sockets or ():
            sock.listen(BACKLOG)
        if self._batches is not None:
            self._batches.start()
        if self._is_first:
            self._throughput = asyncio.create_task(log_throughput(self._llm.stats))
        if self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn, keep responding while draining, and exit with 0 afterwards."""
        self.end()

    def end(self) -> None:
        """Drain and exit; the second call drops running requests."""
        self._num_signals += 1
        if self._companions is not None:
            self._companions.end()

    def check(self) -> None:
        """Raises EngineDeadError if the server stopped because the engine is dead."""
        if self._llm.failure is not None and not self._num_signals:
            raise EngineDeadError(f"the engine has stopped: {self._llm.failure}")

    async def on_tick(self, counter: int) -> bool:
        if self._num_signals and self._drained is None:
            log.info("shutting down: %d requests are running", self._llm.num_active)
            self._drained = asyncio.create_task(self._drain())
        if self._num_signals > 1 or self._llm.failure is not None:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._drained is not None:
            self._drained.cancel()
        if self._throughput is not None:
            self._throughput.cancel()
        if self._batches is not None:
            await self._batches.stop()
        await self._llm.shutdown(drain_timeout=0)
        close = asyncio.get_running_loop().call_later(READERS_S, self._close_connections)
        await super().shutdown(sockets)
        close.cancel()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _close_connections(self) -> None:
        """Drop readers that are too slow: uvicorn would cancel their calls, with a traceback."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._settings.shutdown_timeout_s
        ended = await self._llm.drain(self._settings.shutdown_timeout_s)
        if not ended:
            log.warning("%d requests did not end in time", self._llm.num_active)
        if self._companions is not None:
            left = deadline - asyncio.get_running_loop().time()
            await self._companions.wait(max(0.0, left))
        self.should_exit = True


class HttpParser(h11.Connection):
    """h11's parser, which also refuses requests whose end a proxy may have seen elsewhere."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (
                b"content-length" in names or event.http_version < b"1.1"
            ):
                raise h11.RemoteProtocolError(
                    "the request has Transfer-Encoding and Content-Length, or is HTTP/1.0 with "
                    "Transfer-Encoding; send only Content-Length"
                )
        return event


class Connection(H11Protocol):
    """One connection. h11 limits the size of a request's headers; this adds a deadline, one for
    clients that read nothing, and errors in our format for malformed HTTP."""

    def __init__(
        self, config: uvicorn.Config, *args: Any, stalled_reader_s: float, **options: Any
    ) -> None:
        super().__init__(config, *args, **options)
        assert config.h11_max_incomplete_event_size is not None, "the server sets it"
        self._max_head = config.h11_max_incomplete_event_size
        self.conn = HttpParser(h11.SERVER, self._max_head)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stalled_reader_s = stalled_reader_s
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._head_timer is not None:  # it would keep the connection and its last request
            self._head_timer.cancel()
            self._head_timer = None
        self._cancel_reader_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_reader_timer()

    def _unsupported_upgrade_warning(self) -> None:
        """No warnings: any client could flood the log, and the response names the problem."""

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP, which no route sees. Called while h11's error is handled."""
        self._refuse(_malformed(sys.exception(), self._max_head))

    def shutdown(self) -> None:
        """The server is about to end. A request that has not arrived would hold it up."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self._refuse(ApiError(503, "the server is shutting down", code="shutting_down"))
        else:
            super().shutdown()

    def _refuse(self, error: ApiError) -> None:
        """Answer in the route's place, and close the connection."""
        scope = None
        if self.cycle is not None and not self.cycle.response_complete:
            scope = self.scope
            self.cycle.disconnected = True  # the route's answer is dropped
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = uuid.uuid4().hex
            response = error_response(error, scope, request_id)
            ours = [*response.raw_headers, (b"x-request-id", request_id.encode())]
            head = h11.Response(
                status_code=response.status_code,
                headers=[*self.server_state.default_headers, *ours],
                reason=HTTPStatus(response.status_code).phrase,
            )
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._close()

    def _await_head(self) -> None:
        self._head_deadline = self.loop.time() + HEAD_TIMEOUT_S
        if self._head_timer is None:  # else it runs until then: one for all requests
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._check_head)

    def _check_head(self) -> None:
        self._head_timer = None
        if not (self.cycle is None or self.cycle.response_complete):
            return  # a request is being answered; its end starts the timer again
        if self.transport.is_closing() or self.loop.time() >= self._head_deadline:
            self._close()
        else:
            self._head_timer = self.loop.call_at(self._head_deadline, self._check_head)

    def _close(self) -> None:
        """Close once the client has read everything, or reads no more."""
        self.transport.close()
        self._await_reader()

    def _await_reader(self) -> None:
        """Abort the connection unless the client reads something in time. Called when nothing more
        is written until it has read, or at all."""
        self._cancel_reader_timer()
        self._reader_timer = self.loop.call_later(
            self._stalled_reader_s, self._check_reader, self._num_unread()
        )

    def _check_reader(self, num_unread: int) -> None:
        if self._num_unread() < num_unread:
            self._await_reader()
        else:
            self.transport.abort()

    def _num_unread(self) -> int:
        """Bytes on their way to the client. The system's part can be megabytes, of which a slow
        client takes less in a while than the system waits for before it takes more from us."""
        size = array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, size)
        return self.transport.get_write_buffer_size() + size[0]

    def _cancel_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


def _malformed(fault: BaseException | None, max_head: int) -> ApiError:
    status = fault.error_status_hint if isinstance(fault, h11.RemoteProtocolError) else 400
    if status == 431:
        return ApiError(431, f"the request's headers are larger than {max_head} bytes")
    code = INVALID_HTTP if status == 400 else None
    what = str(fault).partition(": bytearray")[0]  # without h11's quotes of the request
    return ApiError(status, f"the HTTP request is malformed: {what}", code=code)


def _cannot_bind(host: str, port: int, exc: Exception) -> ConfigError:
    code = getattr(exc, "errno", None)
    if code == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use{_listener(port) or ''}; "
            "stop that program, or choose another port with --port (0 takes any free one)"
        )
    if code == errno.EACCES:
        return ConfigError(
            f"this user is not allowed to use port {port} on {host}; choose one above 1023"
        )
    if code == errno.EADDRNOTAVAIL:
        return ConfigError(f"{host} is not an address of this machine; check --host")
    return ConfigError(f"can't listen on {host}:{port}: {exc}")


def _listener(port: int) -> str | None:
    """The process that listens on the port, if this user may see it."""
    import psutil

    try:
        connections: list[Any] = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            if connection.pid is None:
                return " by a process of another user"
            try:
                name = psutil.Process(connection.pid).name()
            except psutil.Error:
                return f" by process {connection.pid}"
            return f" by process {connection.pid} ({name})"
    return None
