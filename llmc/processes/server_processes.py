"""What is known of all processes of a server, and who knows it first.

main process: supervisor.Supervisor --ServerProcesses--> its own front
                                    --ServerProcesses--> API processes (server/worker.py), on a pipe
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from llmc.engine.messages import EngineStats
from llmc.model_info import ModelInfo

DELAYS_S = (0.5, 2.0, 8.0)  # before the first, second and third restart within WINDOW_S
WINDOW_S = 600.0


class EngineUp(msgspec.Struct, frozen=True, kw_only=True):
    """An engine process that takes requests at `address`, which no other one ever has."""

    address: str
    info: ModelInfo
    stats: EngineStats


class ServerProcesses(msgspec.Struct, frozen=True, kw_only=True, tag="processes"):
    """A snapshot. `engine` is None while there is none, and `why` says why."""

    engine: EngineUp | None = None
    why: str = "it has not started yet"
    is_over: bool = False  # and there will be none any more
    restarts: Mapping[str, int] = {}  # process name -> times that it was started again
    pids: Mapping[str, int] = {}  # of those that run now
    gone_fronts: Sequence[str] = ()


Listener = Callable[[ServerProcesses], None]


class ProcessWatch(Protocol):
    """Tells a front about the processes. The listener may be called from another thread."""

    def watch(self, listener: Listener) -> ServerProcesses:
        """Call `listener` from now on; returns what holds now."""

    def dump_stacks(self) -> None:
        """Have the engine process write the stacks of its threads on stderr."""


class RestartBudget:
    """A process may be started again three times in ten minutes, each time after a longer wait."""

    def __init__(self, delays_s: Sequence[float] = DELAYS_S, window_s: float = WINDOW_S) -> None:
        self._delays_s = tuple(delays_s)
        self._window_s = window_s
        self._starts: list[float] = []

    def take(self, now: float) -> float | None:
        """Seconds to wait before the next start; None: it died too often."""
        self._starts = [at for at in self._starts if now - at < self._window_s]
        if len(self._starts) >= len(self._delays_s):
            return None
        self._starts.append(now)
        return self._delays_s[len(self._starts) - 1]

    def __str__(self) -> str:
        minutes = math.ceil(self._window_s / 60)
        return f"{len(self._starts)} of {len(self._delays_s)} in {minutes} minutes"
