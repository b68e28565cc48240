"""The engine processes of one model: one, or as many as `data_parallel_size` says.

    EngineProcesses -- Supervisor "engine"                     one engine
                    -- Supervisor "engine-0", "engine-1" ...   several, each restarted separately

A frontend uses a single link to them, whatever their number (`connect`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

import psutil

from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.frontend.data_parallel import DataParallelLink, smallest
from llmc.frontend.engine_link import EngineLink
from llmc.model_info import OnPhase
from llmc.processes.remote_engine import RemoteEngine
from llmc.processes.server_processes import EngineUp, Listener, ProcessWatch, RestartBudget
from llmc.processes.supervisor import Supervisor

VISIBLE = "CUDA_VISIBLE_DEVICES"


class EngineProcesses:
    """A context manager that ends the processes on exit. `name` is the name of a single engine, or
    the prefix of several.

    `command` and `budget` are for tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str = "engine",
        on_phase: OnPhase | None = None,
        command: Sequence[str] = (),
        budget: Callable[[], RestartBudget] = RestartBudget,
        log_level: str = "warning",
        log_format: str = "text",
    ) -> None:
        self.config = config
        self._name = name
        self._on_phase = on_phase
        self._command = command
        self._budget = budget
        self._log = (log_level, log_format)
        self._stack = contextlib.ExitStack()
        self.supervisors: list[Supervisor] = []

    def __enter__(self) -> EngineProcesses:
        self._start(0, self.config)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stack.close()

    def wait_ready(self) -> EngineUp:
        """Wait until all engines accept requests. -> the first one, with limits that hold for all.
        Raises the error of one that fails to start.

        The first one starts alone, so that the others find what it compiles in the cache.
        """
        first = self.supervisors[0].wait_ready()
        config = self.config
        if first.info.device.startswith("cuda"):  # don't let another one silently use the CPU
            config = dataclasses.replace(config, device="cuda")
        for index in range(1, self.config.data_parallel_size):
            self._start(index, config)
        info = smallest(one.wait_ready().info for one in self.supervisors)
        return dataclasses.replace(first, info=info)

    def suspend(self) -> None:
        """End the processes, which frees their memory, until `resume`."""
        for one in self.supervisors:
            one.suspend()

    def resume(self) -> None:
        """Start them again. Returns when all accept requests. If one fails to start, all stay
        suspended, and its error is raised."""
        for one in self.supervisors:
            one.resume()
        try:
            for one in self.supervisors:
                one.wait_ready()
        except BaseException:
            self.suspend()
            raise

    def memory_bytes(self) -> int:
        """Private memory of the engine processes, as counted by the system."""
        return sum(map(_private_bytes, self._pids()))

    def _pids(self) -> list[int]:
        states = [one.processes for one in self.supervisors]
        return [state.pids[state.name] for state in states if state.name in state.pids]

    @property
    def folder(self) -> str:
        """A folder that is private to the server's processes."""
        return self.supervisors[0].folder

    @property
    def watches(self) -> Mapping[str, ProcessWatch]:
        return {one.name: one for one in self.supervisors}

    def link(self, frontend: str) -> EngineLink:
        return connect(frontend, self.watches, self.config)

    def watch(self, listener: Listener) -> None:
        """Call `listener` with every change of one of the engines from now on."""
        for one in self.supervisors:
            one.watch(listener)

    def report_process(self, name: str, pid: int | None, *, restarted: bool = False) -> None:
        """Report that another process of the server has started or, with None, ended."""
        self.supervisors[0].report_process(name, pid, restarted=restarted)

    def report_gone(self, frontend: str) -> None:
        """Report that a frontend is dead, so that the engines abort its requests."""
        for one in self.supervisors:
            one.report_gone(frontend)

    def _start(self, index: int, config: EngineConfig) -> None:
        is_one = self.config.data_parallel_size == 1
        level, form = self._log
        supervisor = Supervisor(
            config,
            on_phase=self._on_phase if index == 0 else None,
            command=self._command,
            budget=self._budget(),
            name=self._name if is_one else f"{self._name}-{index}",
            environment={} if is_one else own_devices(config, index),
            log_level=level,
            log_format=form,
        )
        self.supervisors.append(self._stack.enter_context(supervisor))


def _private_bytes(pid: int) -> int:
    """Private memory of a process and its descendants; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(int(one.memory_full_info().uss) for one in family)
    except psutil.Error:
        return 0


def connect(frontend: str, watches: Mapping[str, ProcessWatch], config: EngineConfig) -> EngineLink:
    """A link to the engines of `watches`, which are by name. `frontend` is unique in the server."""
    links = {name: RemoteEngine(frontend, watch) for name, watch in watches.items()}
    return DataParallelLink(links, config) if len(links) > 1 else next(iter(links.values()))


def own_devices(config: EngineConfig, index: int) -> dict[str, str]:
    """The environment variable that limits an engine to its own GPUs: one for each rank."""
    if config.device == "cpu":
        return {}
    size = config.tensor_parallel_size
    given = os.environ.get(VISIBLE)
    if given is None:
        mine = [str(number) for number in range(index * size, (index + 1) * size)]
    else:
        mine = [word.strip() for word in given.split(",")][index * size : (index + 1) * size]
        if given and len(mine) < size:
            raise ConfigError(
                f"data_parallel_size {config.data_parallel_size} with {size} GPUs for each engine "
                f"needs {config.data_parallel_size * size}, but {VISIBLE} is {given!r}"
            )
    return {VISIBLE: ",".join(mine)}
