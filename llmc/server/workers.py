"""`--api-workers N`: N - 1 API processes next to the main one, on the same listening socket.

    main process: Workers --WorkerOrder, ServerProcesses, End--> worker processes (server/worker.py)

The kernel gives each connection to one of them. They share the engine process, and share metrics
through files. If one dies, only its own connections are lost, and it is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """The first line that a worker reads."""

    name: str
    index: int  # among the API processes; the main one is 0
    socket_fd: int
    settings: ServerSettings
    config: EngineConfig
    processes: Sequence[ServerProcesses]  # one per engine
    folder: str  # shared by the server's processes: metrics, and SharedCounts
    log_level: str
    log_format: str


@dataclass(frozen=True, slots=True)
class End:
    """Drain and exit; a second one means exit at once."""


MakeOrder = Callable[[str, int, Sequence[ServerProcesses]], WorkerOrder]


class Workers:
    """The worker processes, as a context manager: on exit all of them have ended."""

    def __init__(
        self,
        engines: EngineProcesses,
        make_order: MakeOrder,
        sock: socket.socket,
        count: int,
        counts: SharedCounts,
    ) -> None:
        self._engines = engines
        self._make_order = make_order
        self._sock = sock
        self._counts = counts
        self._budget = RestartBudget()
        self._is_closing = threading.Event()
        self._children: dict[str, Child] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(f"api-{i}", i), name=f"llmc-api-{i}")
            for i in range(1, count + 1)
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
        with Child(command, pass_fds=[self._sock.fileno()]) as child:
            engines = [one.processes for one in self._engines.supervisors]
            child.order(to_line(self._make_order(frontend, index, engines)))
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


def order_maker(
    sock: socket.socket,
    settings: ServerSettings,
    config: EngineConfig,
    *,
    folder: str,
    log_level: str,
    log_format: str,
) -> MakeOrder:
    """Makes orders that differ only in the worker's name and the processes at its start."""

    def make(name: str, index: int, processes: Sequence[ServerProcesses]) -> WorkerOrder:
        return WorkerOrder(
            name=name,
            index=index,
            socket_fd=sock.fileno(),
            settings=settings,
            config=config,
            processes=processes,
            folder=folder,
            log_level=log_level,
            log_format=log_format,
        )

    return make
