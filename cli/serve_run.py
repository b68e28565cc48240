"""`llmc serve` after flag parsing: bind the port, load the model, print the address, serve.

The port is bound first, so that a port in use fails at once and not after loading the model.

    this process (HTTP, text) --ZeroMQ--> engine process     unless --no-engine-process
    more API processes -------ZeroMQ-->   (more of them)     with --api-workers
                                                             with --data-parallel-size
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from llmc.check.background import BackgroundCheck
from llmc.cli.console import about_model, banner, model_rows, note, phases, stderr_console
from llmc.cli.loading import load_async_llm
from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.logs import set_up_logging
from llmc.lora_request import HIGHEST_RAISED_RANK
from llmc.server.run import Companions, bind_socket, check_certificates, serve
from llmc.server.settings import ServerSettings, rank_of_adapter
from llmc.server.unix_socket import unix_socket
from llmc.startup.architecture_certificate import ArchitectureCertificate

if TYPE_CHECKING:
    from llmc.async_llm import AsyncLLM
    from llmc.processes.engine_processes import EngineProcesses
    from llmc.processes.shared_counts import SharedCounts

log = logging.getLogger(__name__)

ANY_ADDRESS = ("0.0.0.0", "::", "")


def run_server(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    log_level: str,
    log_format: str,
    engine_process: bool,
) -> None:
    set_up_logging(log_level, log_format)
    check_certificates(settings)
    _check_folders(settings)
    run = _Run(
        config=_with_ranks(config, settings),
        settings=settings,
        log_level=log_level,
        log_format=log_format,
        console=stderr_console(),
    )
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listening(settings))
        companions: Companions | None = None
        engines: EngineProcesses | None = None
        if engine_process:
            llm, engines = _load_in_process(run, stack)
            if llm.shared is not None:
                companions = _more_workers(run, engines, sock, stack, llm.shared)
        else:
            llm = load_async_llm(run.config, run.console)
        _serve(run, llm, engines, sock, companions)


def _check_folders(settings: ServerSettings) -> None:
    """Report folders that can't be used, before the model is loaded."""
    adapters = settings.runtime_lora_dir
    if adapters is not None and not Path(adapters).is_dir():
        raise ConfigError(f"--runtime-lora-dir {adapters!r} is not a directory")
    if settings.batch_dir is not None:
        from llmc.server.batch_store import BatchStore

        BatchStore(Path(settings.batch_dir).expanduser()).close()


def _with_ranks(config: EngineConfig, settings: ServerSettings) -> EngineConfig:
    """The config with room for the ranks of the server's adapters, which are downloaded before."""
    ranks = [rank_of_adapter(name, path) for name, path in settings.lora_modules.items()]
    most = min(max(ranks, default=0), HIGHEST_RAISED_RANK)
    if most <= config.max_lora_rank:
        return config
    log.info("max_lora_rank is %d, for --lora-modules, instead of %d", most, config.max_lora_rank)
    return replace(config, max_lora_rank=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The arguments of one call of `llmc serve`."""

    config: EngineConfig
    settings: ServerSettings
    log_level: str
    log_format: str
    console: Console


def _serve(
    run: _Run,
    llm: AsyncLLM,
    engines: EngineProcesses | None,
    sock: socket.socket,
    companions: Companions | None,
) -> None:
    from llmc.server.app import create_app

    settings = run.settings
    app = create_app(llm, settings, engines)
    rows = [
        where(settings, sock),
        ("names", ", ".join(app.state.names)),
        *model_rows(llm.info),
        *([("engines", str(size))] if (size := run.config.data_parallel_size) > 1 else ()),
        ("API key", "required" if settings.api_keys else "none"),
    ]
    if llm.info.is_default:
        note(run.console, about_model(llm.info))
    warn_if_open(run.console, settings)
    with contextlib.ExitStack() as stack:

        def on_ready() -> None:
            banner(run.console, "llmc is ready", rows)
            if settings.certificate:
                stack.enter_context(BackgroundCheck(run.config, llm.info, _log_certificate))

        serve(app, settings, sock, on_ready=on_ready, companions=companions)


def _log_certificate(found: ArchitectureCertificate) -> None:
    log.log(logging.WARNING if found.status == "different" else logging.INFO, "%s", found)


def _load_in_process(run: _Run, stack: contextlib.ExitStack) -> tuple[AsyncLLM, EngineProcesses]:
    """Load the engines in separate processes, which end with `stack`."""
    from llmc.processes.engine_processes import EngineProcesses

    with phases(run.console) as on_phase:
        engines = stack.enter_context(
            EngineProcesses(
                run.config,
                on_phase=on_phase,
                log_level=run.log_level,
                log_format=run.log_format,
            )
        )
        if run.settings.api_workers > 1:
            # Must be set before prometheus_client is imported, since the import reads it.
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = engines.folder
        import llmc.server.app  # noqa: F401 - while the engine loads
        from llmc.frontend.engine_options import load_tokenizer, preload_tokenizer

        preload_tokenizer(run.config)
        engine = engines.wait_ready()

    from llmc.async_llm import AsyncLLM
    from llmc.processes.shared_counts import SharedCounts

    size = run.settings.api_workers
    llm = AsyncLLM.from_link(
        engines.link("api-0"),
        engine.info,
        engine.stats,
        run.config,
        load_tokenizer(run.config, engine.info),
        shared=SharedCounts(engines.folder, index=0, size=size) if size > 1 else None,
    )
    return llm, engines


def _more_workers(
    run: _Run,
    engines: EngineProcesses,
    sock: socket.socket,
    stack: contextlib.ExitStack,
    counts: SharedCounts,
) -> Companions:
    from llmc.server.workers import WorkerOrder, Workers

    order = WorkerOrder(
        socket_fd=sock.fileno(),
        settings=run.settings,
        config=run.config,
        folder=engines.folder,
        log_level=run.log_level,
        log_format=run.log_format,
    )
    return stack.enter_context(Workers(engines, order, counts))


def listening(settings: ServerSettings) -> contextlib.AbstractContextManager[socket.socket]:
    if settings.uds is not None:
        return unix_socket(settings.uds)
    return contextlib.closing(bind_socket(settings.host, settings.port))


def where(settings: ServerSettings, sock: socket.socket) -> tuple[str, str]:
    if settings.uds is not None:
        return "socket", settings.uds
    return "URL", url_of(settings, sock) + settings.root_path


def url_of(settings: ServerSettings, sock: socket.socket) -> str:
    """The server's URL for a client on this machine; `sock` has the port chosen for 0."""
    host = settings.host
    shown = "localhost" if host in ANY_ADDRESS else f"[{host}]" if ":" in host else host
    return f"{settings.scheme}://{shown}:{sock.getsockname()[1]}"


def warn_if_open(console: Console, settings: ServerSettings) -> None:
    from llmc.server.guard import is_loopback

    if settings.uds is None and not settings.api_keys and not is_loopback(settings.host):
        note(
            console,
            f"Anyone who can reach {settings.host} can use this server: it has no API key. "
            "Set one with LLMC_API_KEY or --api-key.",
            style="yellow",
        )
