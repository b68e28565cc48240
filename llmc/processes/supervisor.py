"""Starts the engine process, reports its state to all frontends, and restarts it when it dies.

    Supervisor (a thread of the main process) --EngineOrder--> engine process
                                              <- PhaseBegins, Phase, Ready, Failed -
    its state --ServerProcesses--> every frontend

Errors of the first start are raised by `wait_ready`. If the process dies later, it is restarted
within `RestartBudget`; when that is exhausted, the server gives up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmc.config import EngineConfig
from llmc.errors import EngineDeadError
from llmc.model_info import OnPhase, Phase, PhaseBegins
from llmc.processes.child import Child, python_module
from llmc.processes.remote_errors import as_exception, summary
from llmc.processes.server_processes import EngineUp, Listener, RestartBudget, ServerProcesses
from llmc.processes.wire import (
    REPORTS,
    EngineOrder,
    Failed,
    Ready,
    from_line,
    to_line,
)

log = logging.getLogger(__name__)

ENGINE_MODULE = "llmc.processes.engine_main"
POLL_S = 0.05
END_S = 5.0  # for the engine process to exit after its standard input was closed
LONGEST_FOLDER = 70  # characters: the path of a Unix socket can have at most 107


class Supervisor:
    """The engine process of a server. A context manager that ends the process on exit."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_phase: OnPhase | None = None,
        command: Sequence[str] = (),
        budget: RestartBudget | None = None,
        name: str = "engine",
        environment: Mapping[str, str] | None = None,
        log_level: str = "warning",
        log_format: str = "text",
    ) -> None:
        # The engine's own queue is unlimited: frontends refuse excess requests.
        self._config = dataclasses.replace(config, max_num_queued=None)
        self._on_phase = on_phase
        self._title = "the engine process" if name == "engine" else f"the process of {name}"
        self._command = list(command) or python_module(ENGINE_MODULE)
        self._budget = budget or RestartBudget()
        self._log = (log_level, log_format)
        self._environment = environment or {}
        self.folder = private_folder()
        self._processes = ServerProcesses(
            name=name, pids={"api-0": os.getpid()}, restarts={name: 0}
        )
        self._listeners: list[Listener] = []
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._awake = threading.Event()
        self._awake.set()
        self._first = threading.Event()
        self._error: Exception | None = None
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._run, name="llmc-supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self) -> EngineUp:
        """Wait for the first engine to accept requests. Raises the error if it fails to start."""
        while not self._first.wait(0.1):  # short waits, so that Ctrl-C gets through
            pass
        self._on_phase = None  # later starts are only logged
        if self._error is not None:
            raise self._error
        engine = self.processes.engine
        if engine is None:
            raise EngineDeadError(f"the engine has stopped: {self.processes.why}")
        return engine

    @property
    def name(self) -> str:
        return self._processes.name

    @property
    def processes(self) -> ServerProcesses:
        return self._processes

    def watch(self, listener: Listener) -> ServerProcesses:
        with self._lock:
            self._listeners.append(listener)
            return self._processes

    def update(self, **changes: Any) -> None:
        """Change the state and pass it to all listeners."""
        with self._lock:
            self._processes = dataclasses.replace(self._processes, **changes)
            for listener in self._listeners:
                listener(self._processes)

    def report_process(self, name: str, pid: int | None, *, restarted: bool = False) -> None:
        """Report that a process of the server has started or, with None, ended."""
        with self._lock:
            pids = {key: value for key, value in self._processes.pids.items() if key != name}
            if pid is not None:
                pids[name] = pid
            restarts = dict(self._processes.restarts)
            restarts[name] = restarts.get(name, 0) + restarted
            self.update(pids=pids, restarts=restarts)

    def report_gone(self, frontend: str) -> None:
        """Report that a frontend is dead, so that the engine aborts its requests."""
        with self._lock:
            self.update(gone_frontends=[*self._processes.gone_frontends, frontend])

    def dump_stacks(self) -> None:
        child = self._child
        if child is not None:
            child.signal(signal.SIGUSR1)

    def suspend(self) -> None:
        """End the engine process, which frees its memory, until `resume`."""
        self._first.clear()
        self._error = None
        self._awake.clear()
        child = self._child
        if child is not None:
            child.end(END_S)
        while self._thread.is_alive() and not self._processes.is_asleep:
            time.sleep(POLL_S)

    def resume(self) -> None:
        """Start the engine process again. `wait_ready` waits for it, or raises its error if it
        fails to start; then it stays suspended."""
        self._first.clear()
        self._error = None
        self._awake.set()

    def stop(self) -> None:
        """End the engine process and remove the private folder. Idempotent."""
        self._stopped.set()
        child = self._child
        if child is not None:
            child.end(END_S if self._processes.engine is not None else 0)
        if self._thread.is_alive():
            self._thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            self._supervise()
        except Exception as exc:  # nobody would restart the engine, or answer `wait_ready`
            log.exception("%s can't be supervised any more", self._title)
            self._error = self._error or exc
            self._report_down(f"it can't be started: {exc}", is_over=True)
        finally:
            self._first.set()

    def _supervise(self) -> None:
        number, is_restart = 0, False
        while not self._stopped.is_set():
            if not self._awake.is_set():
                self._sleep()
                is_restart = False
                continue
            why = self._live(number, is_restart=is_restart)
            number += 1
            if self._stopped.is_set() or (self._error is not None and number == 1):
                log.debug("%s ended: %s", self._title, why)
                break
            if self._error is not None:  # it failed to wake up
                self._awake.clear()
            if not self._awake.is_set():
                continue
            is_restart = True
            delay_s = self._budget.take(time.monotonic())
            if delay_s is None:
                log.error("%s died again: %s; giving up (%s)", self._title, why, self._budget)
                self._report_down(f"{why}; it died too often", is_over=True)
                break
            log.error("%s died: %s", self._title, why)
            log.info("restarting it in %g s (%s)", delay_s, self._budget)
            self._report_down(f"{why}; it is being restarted")
            self._stopped.wait(delay_s)

    def _sleep(self) -> None:
        """Sleep until `resume` or `stop`."""
        self._report_down("it is asleep", is_asleep=True)
        if self._error is not None:
            self._first.set()
        while not (self._awake.is_set() or self._stopped.is_set()):
            self._awake.wait(POLL_S)
        shutil.rmtree(self.folder, ignore_errors=True)  # the engine that exited has also done that
        self.folder = private_folder()
        self.update(is_asleep=False, why="it is being woken")

    def _live(self, number: int, *, is_restart: bool) -> str:
        """Run one engine process from start to end. Returns the reason for its end."""
        address = f"ipc://{self.folder}/engine-{number}"
        try:
            child = Child(self._command, environment=self._environment)
        except OSError as exc:  # no memory for another process
            return self._did_not_start(exc)
        with child:
            self._child = child
            if self._stopped.is_set() or not self._awake.is_set():
                return "it was no longer needed"
            self.report_process(self.name, child.pid, restarted=is_restart)
            try:
                ready = self._start(child, address)
                self.update(engine=EngineUp(address=address, info=ready.info, stats=ready.stats))
                self._first.set()
                end = child.wait()
                failed = next((r for r in self._reports(child) if isinstance(r, Failed)), None)
                why = end if failed is None else f"it failed: {summary(failed)}"
            except Exception as exc:
                why = self._did_not_start(exc)
            finally:
                self._child = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address.removeprefix("ipc://"))
        return why

    def _did_not_start(self, error: Exception) -> str:
        """Keep the error for `wait_ready`. Returns the reason for the process's end."""
        if not self._first.is_set():
            self._error = error
        return f"it did not start: {error}"

    def _report_down(self, why: str, **more: bool) -> None:
        with self._lock:
            self.update(engine=None, why=why, **more)
            self.report_process(self.name, None)

    def _start(self, child: Child, address: str) -> Ready:
        child.order(to_line(self._order(address)))
        for report in self._reports(child):
            match report:
                case PhaseBegins() | Phase():
                    self._show(report)
                case Ready():
                    return report
                case Failed():
                    raise as_exception(report)
        raise EngineDeadError(f"the engine process did not start: {child.wait()}")

    def _reports(self, child: Child) -> Iterator[Any]:
        return (from_line(line, *REPORTS) for line in child.reports())

    def _order(self, address: str) -> EngineOrder:
        level, form = self._log
        return EngineOrder(
            config=self._config,
            folder=self.folder,
            address=address,
            log_level=level,
            log_format=form,
        )

    def _show(self, phase: PhaseBegins | Phase) -> None:
        if self._on_phase is not None:
            self._on_phase(phase)
        elif isinstance(phase, Phase):
            log.info("%s: %.2f s %s", phase.name, phase.seconds, phase.detail)


def private_folder() -> str:
    """Create a folder that only this user can access, for the processes' sockets."""
    place = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(place) > LONGEST_FOLDER or not os.access(place, os.W_OK | os.X_OK):
        place = "/tmp"
    return tempfile.mkdtemp(prefix="llmc-", dir=place)  # mode 0700
