"""The way from a front to its engine and back, whichever of the two it is.

    AsyncLLM --AddRequest, AbortRequest--> EngineLink --> the engine
             <-- EngineNews -------------- EngineLink <--

`engine_thread.EngineThread`: an engine in a thread of this process. `remote.RemoteEngine`: one in a
process of its own, which may die and be started again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llmc.engine.messages import AbortRequest, AddRequest, EngineStats, RequestUpdate

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo

Message = AddRequest | AbortRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNews:
    """What came of one turn of the engine: updates, and its numbers afterwards.

    `dead` is the reason why there is no engine any more; all its requests are lost. `is_final`:
    none will follow. `started` announces a new one: the old one is gone, with its requests.
    """

    updates: Sequence[RequestUpdate] = ()
    stats: EngineStats | None = None
    dead: str | None = None
    is_final: bool = True
    started: ModelInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """What the server consists of, for those who look after it."""

    pids: Mapping[str, int]  # by name, of those that run
    restarts: Mapping[str, int]  # by name, how often one was started again


Publish = Callable[[EngineNews], None]


class EngineLink(Protocol):
    """Used from one event loop, in which `publish` is called."""

    def open(self, publish: Publish) -> None: ...
    def send(self, message: Message) -> None: ...
    def dump_stacks(self) -> None:
        """Have the stacks of the engine's threads written on stderr."""

    def processes(self) -> Processes: ...
    async def close(self) -> None: ...
