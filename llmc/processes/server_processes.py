"""`ServerProcesses`: the current processes of a server. The main process informs the others.

main process: supervisor.Supervisor --ServerProcesses--> its own frontend
                                    --ServerProcesses--> API processes (server/worker.py), on a pipe
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmc.engine.messages import EngineStats
from llmc.model_info import ModelInfo

DELAYS_S = (0.5, 2.0, 8.0)  # before the first, second and third restart within WINDOW_S
WINDOW_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUp:
    """An engine process that accepts requests at `address`, which is never reused."""

    address: str
    info: ModelInfo
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcesses:
    """A snapshot. `engine` is None while there is none, and `why` gives the reason.

    A server with several engines has one of these for each, by its `name`.
    """

    name: str = "engine"
    engine: EngineUp | None = None
    why: str = "it has not started yet"
    is_over: bool = False  # the engine will not be restarted
    is_asleep: bool = False  # it was stopped on purpose, and waits to be woken
    restarts: Mapping[str, int] = field(default_factory=dict)  # process name -> count
    pids: Mapping[str, int] = field(default_factory=dict)  # of running processes
    gone_frontends: Sequence[str] = ()


Listener = Callable[[ServerProcesses], None]


class ProcessWatch(Protocol):
    """Informs frontends about the processes. Listeners can be called from any thread."""

    def watch(self, listener: Listener) -> ServerProcesses:
        """Call `listener` with every change from now on. Returns the current state."""

    def dump_stacks(self) -> None:
        """Have the engine process write the stacks of its threads to stderr."""


class RestartBudget:
    """A process can be restarted three times in ten minutes, each time after a longer delay."""

    def __init__(self, delays_s: Sequence[float] = DELAYS_S, window_s: float = WINDOW_S) -> None:
        self._delays_s = tuple(delays_s)
        self._window_s = window_s
        self._starts: list[float] = []

    def take(self, now: float) -> float | None:
        """Seconds to wait before the next start; None if it has died too often."""
        self._starts = [at for at in self._starts if now - at < self._window_s]
        if len(self._starts) >= len(self._delays_s):
            return None
        self._starts.append(now)
        return self._delays_s[len(self._starts) - 1]

    def __str__(self) -> str:
        minutes = math.ceil(self._window_s / 60)
        return f"{len(self._starts)} of {len(self._delays_s)} in {minutes} minutes"
