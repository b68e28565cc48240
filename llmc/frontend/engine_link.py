"""How `AsyncLLM` reaches its engine, wherever that runs.

    AsyncLLM --AddRequest, AbortRequest, GetState, Operate--> EngineLink --> the engine
             <-- EngineOutputs, EngineState, Operated, EngineStarted, EngineLost --

`engine_thread.EngineThread`: an engine in a thread of this process.
`processes.remote_engine.RemoteEngine`: one in another process, which may die and be restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llmc.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineOutputs,
    EngineState,
    EngineStats,
    GetState,
    Operate,
    Operated,
)

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo

Message = AddRequest | AbortRequest | GetState | Operate


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStarted:
    """A new engine takes requests; those of the one before are lost. `stats` None: unchanged."""

    info: ModelInfo
    stats: EngineStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """There is no engine any more, and all requests with it. `is_final`: there will be none."""

    reason: str
    is_final: bool


EngineEvent = EngineOutputs | EngineState | Operated | EngineStarted | EngineLost


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes of the server, for monitoring."""

    pids: Mapping[str, int]  # process name -> pid, of those that run
    restarts: Mapping[str, int]  # process name -> times that it was restarted


Publish = Callable[[EngineEvent], None]


class EngineLink(Protocol):
    """Used from one event loop, in which `publish` is called."""

    def open(self, publish: Publish) -> None: ...
    def send(self, message: Message) -> None: ...
    def dump_stacks(self) -> None:
        """Write the stacks of the engine's threads to stderr."""

    def processes(self) -> Processes: ...
    async def close(self) -> None: ...
