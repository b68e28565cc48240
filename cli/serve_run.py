"""`llmc serve` after its flags: take the port, load the model, say where it is, serve.

The port comes first: that it is taken is then known at once and not after a model was loaded.
"""

from __future__ import annotations

import contextlib
import logging
import socket

from rich.console import Console

from llmc.cli.console import banner, model_rows, note, stderr_console
from llmc.cli.loading import load_async_llm
from llmc.config import EngineConfig
from llmc.server.run import bind_socket, serve
from llmc.server.settings import ServerSettings
from llmc.server.unix_socket import unix_socket

ANY_ADDRESS = ("0.0.0.0", "::", "")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_server(config: EngineConfig, settings: ServerSettings, *, log_level: str) -> None:
    _set_up_logging(log_level)
    console = stderr_console()
    with _listening(settings) as sock:
        llm = load_async_llm(config, console)
        from llmc.server.app import create_app

        app = create_app(llm, settings)
        rows = [
            _where(settings, sock),
            ("names", ", ".join(app.state.names)),
            *model_rows(llm.info),
            ("API key", "required" if settings.api_keys else "none"),
        ]
        if llm.info.is_builtin:
            from llmc.guide import NOTICE

            note(console, NOTICE, style="yellow")
        _warn_if_open(console, settings)
        serve(app, settings, sock, on_ready=lambda: banner(console, "llmc is ready", rows))


def _listening(settings: ServerSettings) -> contextlib.AbstractContextManager[socket.socket]:
    if settings.uds is not None:
        return unix_socket(settings.uds)
    return contextlib.closing(bind_socket(settings.host, settings.port))


def _where(settings: ServerSettings, sock: socket.socket) -> tuple[str, str]:
    if settings.uds is not None:
        return "socket", settings.uds
    return "URL", url_of(settings.host, sock)


def url_of(host: str, sock: socket.socket) -> str:
    """Where a client on this machine finds the server; `sock` knows the port that 0 became."""
    shown = "localhost" if host in ANY_ADDRESS else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{sock.getsockname()[1]}"


def _warn_if_open(console: Console, settings: ServerSettings) -> None:
    from llmc.server.guard import is_loopback

    if settings.uds is None and not settings.api_keys and not is_loopback(settings.host):
        note(
            console,
            f"Anyone who can reach {settings.host} can use this server: it has no API key. "
            "Set one with LLMC_API_KEY or --api-key.",
            style="yellow",
        )


def _set_up_logging(level: str) -> None:
    logging.basicConfig(format=LOG_FORMAT, level=logging.WARNING)
    logging.getLogger("llmc").setLevel(level.upper())
