"""How `AsyncLLM` communicates with its engine, wherever that runs.

    AsyncLLM --AddRequest, AbortRequest, GetState, Operate--> EngineLink --> the engine
             <-- EngineOutputs, EngineState, OperationResult,
                 EngineStarted, EngineLost, RequestsLost --

`engine_thread.EngineThread`: an engine in a thread of this process.
`processes.remote_engine.RemoteEngine`: one in another process, which may die and be restarted.
`data_parallel.DataParallelLink`: several of these; each request is routed to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from llmc.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineOutputs,
    EngineState,
    EngineStats,
    GetState,
    Operate,
    OperationResult,
)

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo

Message = AddRequest | AbortRequest | GetState | Operate


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStarted:
    """A new engine accepts requests; the previous one's are lost. `stats` None: unchanged."""

    info: ModelInfo
    stats: EngineStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """The engine has stopped, and all requests are lost. `is_final`: it will not be restarted.

    `is_asleep`: it was stopped on purpose, and starts again when it is woken.
    """

    reason: str
    is_final: bool
    is_asleep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsLost:
    """One of several engines has stopped, and these requests are lost; the others keep serving."""

    request_ids: Sequence[str]  # as the engine knows them
    reason: str


EngineEvent = (
    EngineOutputs | EngineState | OperationResult | EngineStarted | EngineLost | RequestsLost
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes of the server, for monitoring."""

    pids: Mapping[str, int]  # process name -> pid, of running processes
    restarts: Mapping[str, int]  # process name -> number of restarts
    # By name, if there are several engines; None: it is down.
    engines: Mapping[str, EngineStats | None] = field(default_factory=dict)


Publish = Callable[[EngineEvent], None]


class EngineLink(Protocol):
    """A link to the engine. Used from one event loop, in which `publish` is called."""

    def open(self, publish: Publish) -> None: ...
    def send(self, message: Message) -> None: ...
    def dump_stacks(self) -> None:
        """Write the stacks of the engine's threads to stderr."""

    @property
    def has_idle_engine(self) -> bool:
        """Whether some engine has none of the requests in flight, so that it may stay silent."""

    def processes(self) -> Processes: ...
    async def close(self) -> None: ...
