"""The engine in a thread of its own, which hears and says only messages.

    front thread --AddRequest, AbortRequest--> inbox --> engine.add / abort / step
                 <------- EngineNews ------------------- publish

Nothing else is shared, so the thread can become a process: then the two queues become sockets.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmc.engine.messages import AbortRequest, AddRequest, EngineStats, RequestUpdate
from llmc.errors import LlmcError
from llmc.front.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stop:
    """Tells the engine thread to end after what it is doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNews:
    """What came of one turn of the engine: updates, and its numbers afterwards.

    `dead` is the reason why the engine stopped for good; it is then the last news.
    """

    updates: Sequence[RequestUpdate] = ()
    stats: EngineStats | None = None
    dead: str | None = None


Message = AddRequest | AbortRequest | Stop


class EngineThread:
    """Runs `engine` and reports each turn to `publish`, which is called from the thread."""

    def __init__(self, engine: Engine, publish: Callable[[EngineNews], None]) -> None:
        self._engine = engine
        self._publish = publish
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # A daemon, so that a process whose main thread fell over still exits.
        self._thread = threading.Thread(target=self._run, name="llmc-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        self._inbox.put(message)

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as exc:
            log.exception("the engine failed")
            self._publish(EngineNews(dead=f"{type(exc).__name__}: {exc}"[:500]))

    def _turn(self) -> bool:
        """Take what is in the inbox, do one step, say what came of it. False: told to stop."""
        messages = self._receive()
        refused: list[RequestUpdate] = []
        for message in messages:
            if isinstance(message, Stop):
                return False
            if isinstance(message, AbortRequest):
                self._engine.abort(message.request_id)
            else:
                refused.extend(self._add(message))
        updates = self._engine.step() if self._engine.has_work else ()
        self._publish(EngineNews(updates=[*refused, *updates], stats=self._engine.stats()))
        return True

    def _receive(self) -> list[Message]:
        """Everything that waits; when the engine is idle, sleeps until something comes."""
        messages = []
        if not self._engine.has_work:
            messages.append(self._inbox.get())
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def _add(self, message: AddRequest) -> Sequence[RequestUpdate]:
        """A request that the engine refuses fails alone."""
        try:
            self._engine.add(message)
        except LlmcError as exc:
            failed = RequestUpdate(
                request_id=message.request_id, finish_reason="error", error=str(exc)
            )
            return (failed,)
        return ()
