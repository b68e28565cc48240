"""`--api-workers N`: N - 1 API processes next to the main one, on the same listening socket.

    main process: Workers --WorkerOrder, ServerProcesses, End--> worker processes (server/worker.py)

The kernel gives each connection to one of them. They share the engine process, and share metrics
through files. If one dies, only its own connections are lost, and it is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmc.config import EngineConfig
from llmc.processes.child import Child, python_module
from llmc.processes.engine_processes import EngineProcesses
from llmc.processes.server_processes import RestartBudget, ServerProcesses
from llmc.processes.shared_counts import SharedCounts
from llmc.processes.wire import to_line
from llmc.server.settings import ServerSettings

log = logging.getLogger(__name__)

WORKER_MODULE = "llmc.server.worker"
END_S = 3.0  # for a worker that must end at once
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """The first line that a worker reads. `Workers` sets what differs between workers."""

    name: str = ""
    index: int = 0  # among the API processes; the main one is 0
    processes: Sequence[ServerProcesses] = ()  # one per engine, as they are at its start
    socket_fd: int
    settings: ServerSettings
    config: EngineConfig
    folder: str  # shared by the server's processes: metrics, and SharedCounts
    log_level: str
    log_format: str


@dataclass(frozen=True, slots=True)
class End:
    """Drain and exit; a second one means exit at once."""


class Workers:
    """The worker processes, as a context manager: on exit all of them have ended."""

    def __init__(self, engines: EngineProcesses, order: WorkerOrder, counts: SharedCounts) -> None:
        self._engines = engines
        self._order = order
        self._counts = counts
        self._budget = RestartBudget()
        self._is_closing = threading.Event()
        self._children: dict[str, Child] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(f"api-{i}", i), name=f"llmc-api-{i}")
            for i in range(1, order.settings.api_workers)
        ]

    def __enter__(self) -> Workers:
        self._engines.watch(self._pass_on)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        for child in self._running():
            child.end(END_S)
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        self._is_closing.set()
        for child in self._running():
            child.order(to_line(End()))

    async def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while any(thread.is_alive() for thread in self._threads):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def _pass_on(self, processes: ServerProcesses) -> None:
        line = to_line(processes)
        for child in self._running():
            child.order(line)

    def _running(self) -> Sequence[Child]:
        return list(self._children.values())

    # ---- one thread per worker ----

    def _run(self, name: str, index: int) -> None:
        number = 0
        while not self._is_closing.is_set():
            # The engine must never mistake a worker for its predecessor that died.
            frontend = name if number == 0 else f"{name}.{number}"
            try:
                why = self._live(name, index, frontend, is_restart=number > 0)
            except OSError as error:  # no memory for another process
                why = f"it did not start: {error}"
            if self._is_closing.is_set():
                return
            self._engines.report_gone(frontend)
            self._counts.clear(index)
            delay_s = self._budget.take(time.monotonic())
            if delay_s is None:
                log.error("%s died: %s; it is not restarted (%s)", name, why, self._budget)
                return
            log.error("%s died: %s; restarting it in %g s (%s)", name, why, delay_s, self._budget)
            self._is_closing.wait(delay_s)
            number += 1

    def _live(self, name: str, index: int, frontend: str, *, is_restart: bool) -> str:
        command = python_module(WORKER_MODULE)
        with Child(command, pass_fds=[self._order.socket_fd]) as child:
            engines = [one.processes for one in self._engines.supervisors]
            order = replace(self._order, name=frontend, index=index, processes=engines)
            child.order(to_line(order))
            self._children[name] = child  # only now, since the order must be its first line
            for one in self._engines.supervisors:  # they may have changed since it was made
                child.order(to_line(one.processes))
            self._engines.report_process(name, child.pid, restarted=is_restart)
            if self._is_closing.is_set():
                return "it was no longer needed"
            for _ in child.reports():
                log.info("%s is ready", name)
            why = child.wait()
            del self._children[name]
        self._engines.report_process(name, None)
        return why
