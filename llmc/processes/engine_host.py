"""The engine's side of the process border: one engine, any number of fronts.

    fronts --Submit, Cancel--> ROUTER --> engine.add / abort / step
           <----- News ------- ROUTER <--

One thread does it all: while a step runs, messages wait in ZeroMQ's own thread. Each front hears
only of its own requests. A front that reads nothing for a long time loses its requests instead of
filling memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import zmq

from llmc.engine.messages import EngineStats, RequestUpdate
from llmc.frontend.engine_options import Engine
from llmc.frontend.engine_thread import add_or_refuse
from llmc.processes.wire import (
    FRONT_MESSAGES,
    Cancel,
    Gone,
    Hello,
    News,
    Refused,
    Submit,
    Unpacker,
    WireError,
    pack,
)

log = logging.getLogger(__name__)

MAX_UNREAD = 20_000  # messages to one front, minutes of steps, before it counts as lost
IDLE_POLL_MS = 200
IDLE_NEWS_S = 0.5  # between two looks at the numbers for a front without requests


@dataclass(slots=True, kw_only=True)
class _Front:
    identity: bytes
    requests: set[str] = field(default_factory=set)
    updates: list[RequestUpdate] = field(default_factory=list)
    told_at: float = 0.0
    told: EngineStats | None = None


class EngineHost:
    """Serves fronts on `socket` until `is_stopped`, or until the engine fails."""

    def __init__(
        self, engine: Engine, socket: zmq.Socket[bytes], is_stopped: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._is_stopped = is_stopped
        self._read: Unpacker[FRONT_MESSAGES] = Unpacker(FRONT_MESSAGES)
        self._fronts: dict[bytes, _Front] = {}
        self._owners: dict[str, _Front] = {}
        self._refused: dict[bytes, str] = {}  # who must be told, and what

    def run(self) -> None:
        """Raises what the engine raises when no later step can succeed."""
        while not self._is_stopped():
            self.turn()

    def turn(self) -> None:
        """Take what has come, do one step, tell the fronts."""
        is_busy = self._engine.has_work or self._engine.use_idle_time()
        if self._socket.poll(0 if is_busy else IDLE_POLL_MS):
            self._receive()
        if self._engine.has_work:
            self._sort(self._engine.step())
        self._tell()

    def _receive(self) -> None:
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(identity, self._read(frames))
            except WireError as exc:
                log.error("a front was refused: %s", exc)
                self._refuse(identity, str(exc))

    def _handle(self, identity: bytes, message: FRONT_MESSAGES) -> None:
        front = self._fronts.get(identity)
        if isinstance(message, Hello):
            self._drop(identity)
            self._fronts[identity] = _Front(identity=identity)
        elif isinstance(message, Gone):
            self._drop(message.front.encode())
        elif front is None:
            self._refuse(identity, "the engine does not know this front")
        elif isinstance(message, Cancel):
            if self._owners.get(message.request_id) is front:
                self._engine.abort(message.request_id)
                self._forget(message.request_id)
        else:
            self._submit(front, message)

    def _submit(self, front: _Front, message: Submit) -> None:
        refused = add_or_refuse(self._engine, message.request)
        front.updates.extend(refused)
        if not refused:
            self._owners[message.request.request_id] = front
            front.requests.add(message.request.request_id)

    def _sort(self, updates: Iterable[RequestUpdate]) -> None:
        for update in updates:
            front = self._owners.get(update.request_id)
            if front is None:
                continue  # cancelled while the step ran
            front.updates.append(update)
            if update.finish_reason is not None:
                self._forget(update.request_id)

    def _tell(self) -> None:
        for identity, reason in list(self._refused.items()):
            if self._send(identity, Refused(reason)):
                del self._refused[identity]
        if not self._fronts:
            return
        stats, now = self._engine.stats(), time.monotonic()
        for front in list(self._fronts.values()):
            # With requests it hears of every turn: that the engine is at work is news, too.
            is_quiet = not front.updates and (not front.requests or not self._engine.has_work)
            if is_quiet and (front.told == stats or now - front.told_at < IDLE_NEWS_S):
                continue
            if self._send(front.identity, News(front.updates, stats)):
                front.updates, front.told, front.told_at = [], stats, now
            else:
                self._refuse(front.identity, "this front read nothing for a long time")

    def _send(self, identity: bytes, message: News | Refused) -> bool:
        """False: the front reads too little, or is not connected any more."""
        try:
            self._socket.send_multipart([identity, *pack(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(identity)
            return True  # nobody is left to be told
        return True

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._drop(identity)
        self._refused[identity] = reason

    def _drop(self, identity: bytes) -> None:
        """Forget a front, and abort what it had asked for."""
        self._refused.pop(identity, None)
        front = self._fronts.pop(identity, None)
        for request_id in list(front.requests) if front is not None else ():
            self._engine.abort(request_id)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._owners.pop(request_id).requests.discard(request_id)


def bind(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The engine's socket at `address`."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # errors instead of messages lost in silence
    socket.setsockopt(zmq.SNDHWM, MAX_UNREAD)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket
