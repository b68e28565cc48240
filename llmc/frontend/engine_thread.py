"""The engine in a separate thread, reached by messages only.

    event loop --AddRequest, AbortRequest, GetState, Operate--> inbox --> engine.add / abort / ...
               <---------- EngineOutputs, EngineState, OperationResult ---------- publish

Nothing else is shared. processes/remote_engine.py and engine_host.py do the same across process
boundaries.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import queue
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from llmc.background_thread import BackgroundThread
from llmc.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineOutputs,
    GetState,
    Operate,
    RequestUpdate,
)
from llmc.errors import InvalidRequestError, LlmcError
from llmc.frontend.engine_link import EngineEvent, EngineLost, Message, Processes, Publish
from llmc.frontend.engine_options import Engine

log = logging.getLogger(__name__)

JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the engine thread after its current turn."""


class EngineThread:
    """Runs `engine` and reports each turn. `on_end` is called when it has stopped, also if it was
    closed without having been opened."""

    def __init__(self, engine: Engine, on_end: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[Message | Stop] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._report: Publish | None = None
        # A daemon thread, so that a process whose main thread has failed still exits.
        self._thread = BackgroundThread(
            self._run, "llmc-engine", stop=partial(self._inbox.put, Stop())
        )

    def open(self, publish: Publish) -> None:
        self._loop, self._report = asyncio.get_running_loop(), publish
        self._thread.start()

    def send(self, message: Message) -> None:
        self._inbox.put(message)

    has_idle_engine = False  # there is one engine

    def dump_stacks(self) -> None:
        # The process's own stderr, because faulthandler writes directly to a file descriptor.
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)

    def processes(self) -> Processes:
        return Processes(pids={"api-0": os.getpid()}, restarts={})

    async def close(self) -> None:
        if self._loop is None:
            await asyncio.to_thread(self._on_end)
        else:
            self._inbox.put(Stop())
            await asyncio.to_thread(self._thread.join, JOIN_S)

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as exc:
            log.exception("the engine failed")
            reason = f"{type(exc).__name__}: {exc}"[:500]
            self._publish(EngineLost(reason=reason, is_final=True))
        finally:
            self._on_end()

    def _turn(self) -> bool:
        """Empty the inbox, run one step, publish the outputs. Returns False on a Stop message."""
        messages = self._receive()
        refused: list[RequestUpdate] = []
        for message in messages:
            if isinstance(message, Stop):
                return False
            if isinstance(message, AbortRequest):
                self._engine.abort(message.request_id)
            elif isinstance(message, GetState):
                self._publish(self._engine.state())
            elif isinstance(message, Operate):
                self._publish(self._engine.run_operation(message))
            else:
                refused.extend(add_or_refuse(self._engine, message))
        updates = self._engine.step() if self._engine.has_work else ()
        outputs = EngineOutputs(updates=[*refused, *updates], stats=self._engine.stats())
        self._publish(outputs)
        return True

    def _receive(self) -> list[Message | Stop]:
        """All waiting messages. If the engine is idle, blocks until one arrives."""
        messages = []
        if not self._engine.has_work:
            while self._inbox.empty() and self._engine.use_idle_time():
                pass
            messages.append(self._inbox.get())
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def _publish(self, event: EngineEvent) -> None:
        assert self._loop is not None and self._report is not None, "the thread starts in open()"
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there are no readers
            self._loop.call_soon_threadsafe(self._report, event)


def add_or_refuse(engine: Engine, message: AddRequest) -> Sequence[RequestUpdate]:
    """Add a request to the engine. If it is refused, return the update that reports that."""
    try:
        engine.add(message)
    except LlmcError as exc:
        error, is_refused = str(exc), isinstance(exc, InvalidRequestError)
    except Exception as exc:  # such as "can't start new thread": it ends this request only
        log.exception("request %r could not be added", message.request_id)
        error, is_refused = f"{type(exc).__name__}: {exc}", False
    else:
        return ()
    failed = RequestUpdate(
        request_id=message.request_id, finish_reason="error", error=error, is_refused=is_refused
    )
    return (failed,)
