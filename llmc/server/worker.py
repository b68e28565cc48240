"""An additional API process: `python -P -m llmc.server.worker`, started by server/workers.py.

A second frontend on the same listening socket and the same engine process. From its standard input
it reads the engine's state and the order to end. When that closes, the main process has died, and
this one exits too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from llmc.logs import set_up_logging
from llmc.parent_watch import die_with_parent, leave, leave_signals_to_parent
from llmc.processes.server_processes import EngineUp, Listener, ServerProcesses
from llmc.processes.wire import from_line
from llmc.server.workers import End, WorkerOrder

if TYPE_CHECKING:
    from llmc.async_llm import AsyncLLM


class EngineWatch:
    """The state of one engine, as sent by the main process. A server_processes.ProcessWatch."""

    def __init__(self, processes: ServerProcesses) -> None:
        self._processes = processes
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def watch(self, listener: Listener) -> ServerProcesses:
        with self._lock:
            self._listeners.append(listener)
            return self._processes

    def update(self, processes: ServerProcesses) -> None:
        with self._lock:
            self._processes = processes
            for listener in self._listeners:
                listener(processes)

    def dump_stacks(self) -> None:
        pid = self._processes.pids.get(self._processes.name)
        if pid is not None and self._processes.engine is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just died
                os.kill(pid, signal.SIGUSR1)


class MainProcess:
    """Reads the main process's messages, line by line."""

    def __init__(self, order: WorkerOrder) -> None:
        self.watches = {one.name: EngineWatch(one) for one in order.processes}
        self.on_end: Callable[[], object] = lambda: os._exit(0)  # nothing is served yet
        self._thread = threading.Thread(target=self._run, name="llmc-orders", daemon=True)
        self._thread.start()

    def wait_for_engines(self) -> list[EngineUp]:
        """Wait until an engine is up (at first there may be none); returns all that are up."""
        known = threading.Event()

        def listen(processes: ServerProcesses) -> None:
            if processes.engine is not None:
                known.set()

        while True:
            engines = [one.watch(listen).engine for one in self.watches.values()]
            if any(engines):
                return [engine for engine in engines if engine is not None]
            known.wait()

    def _run(self) -> None:
        for line in sys.stdin.buffer:
            message = from_line(line, ServerProcesses, End)
            if isinstance(message, End):
                self.on_end()
            else:
                self.watches[message.name].update(message)
        os._exit(0)


def main() -> int:
    leave_signals_to_parent()
    die_with_parent()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    order: WorkerOrder = from_line(line, WorkerOrder)
    set_up_logging(order.log_level, order.log_format)
    # Must be set before prometheus_client is imported, which reads it then.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = order.folder
    parent = MainProcess(order)
    _serve(order, _connect(order, parent), parent)
    return 0


def _connect(order: WorkerOrder, parent: MainProcess) -> AsyncLLM:
    from llmc.async_llm import AsyncLLM
    from llmc.frontend.data_parallel import smallest
    from llmc.frontend.engine_options import load_tokenizer
    from llmc.processes.engine_processes import connect
    from llmc.processes.shared_counts import SharedCounts

    engines = parent.wait_for_engines()
    info = smallest(engine.info for engine in engines)
    return AsyncLLM.from_link(
        connect(order.name, parent.watches, order.config),
        info,
        engines[0].stats,
        order.config,
        load_tokenizer(order.config, info),
        shared=SharedCounts(order.folder, index=order.index, size=order.settings.api_workers),
    )


def _serve(order: WorkerOrder, llm: AsyncLLM, parent: MainProcess) -> None:
    from llmc.server.app import create_app
    from llmc.server.run import Server

    class WorkerServer(Server):
        _is_first = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Ignore signals: uvicorn has replaced our handlers with this one."""

    def ready() -> None:
        loop = asyncio.get_running_loop()
        parent.on_end = lambda: loop.call_soon_threadsafe(server.end)
        with os.fdopen(int(sys.argv[-1]), "wb") as report:
            report.write(b"ready\n")

    server = WorkerServer(create_app(llm, order.settings), order.settings, on_ready=ready)
    server.run(sockets=[socket.socket(fileno=order.socket_fd)])


if __name__ == "__main__":
    leave(main())
