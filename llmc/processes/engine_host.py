"""The engine's side of the process boundary: one engine, any number of frontends.

    frontends --AddRequest, AbortRequest, GetState, Operate--> ROUTER --> engine.add / abort / ...
              <------- EngineOutputs, EngineState, OperationResult -- ROUTER <--

A single thread does everything: while a step runs, messages wait in ZeroMQ's own thread. A frontend
only gets the updates of its own requests. If it reads nothing for a long time, its requests are
dropped, so that its messages do not fill up memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import zmq

from llmc.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineOutputs,
    EngineState,
    EngineStats,
    GetState,
    Operate,
    OperationResult,
    RequestUpdate,
)
from llmc.frontend.engine_options import Engine
from llmc.frontend.engine_thread import add_or_refuse
from llmc.processes.wire import (
    TO_ENGINE,
    Disconnected,
    FrontendGone,
    Hello,
    Unpacker,
    WireError,
    pack,
)

log = logging.getLogger(__name__)

UNREAD = "this frontend has read nothing for a long time"
MAX_UNREAD = 20_000  # messages to one frontend, minutes of steps, before it counts as lost
IDLE_POLL_MS = 200
IDLE_STATS_S = 0.5  # between two reports of changed statistics to a frontend without requests

ToEngine = Hello | AddRequest | AbortRequest | GetState | Operate | FrontendGone

FromEngine = EngineOutputs | EngineState | OperationResult | Disconnected


@dataclass(slots=True, kw_only=True)
class _Frontend:
    identity: bytes
    requests: set[str] = field(default_factory=set)
    updates: list[RequestUpdate] = field(default_factory=list)
    sent_at: float = 0.0
    sent_stats: EngineStats | None = None


class EngineHost:
    """Serves frontends on `socket` until `is_stopped()`, or until the engine fails."""

    def __init__(
        self, engine: Engine, socket: zmq.Socket[bytes], is_stopped: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._is_stopped = is_stopped
        self._read: Unpacker[ToEngine] = Unpacker(TO_ENGINE)
        self._frontends: dict[bytes, _Frontend] = {}
        self._owners: dict[str, _Frontend] = {}
        self._dropped: dict[bytes, str] = {}  # frontends yet to be sent Disconnected, and why

    def run(self) -> None:
        """Serve. Raises the engine's error when no later step can succeed."""
        while not self._is_stopped():
            self.turn()

    def turn(self) -> None:
        """Handle the waiting messages, run one step, send the frontends their updates."""
        is_busy = self._engine.has_work or self._engine.use_idle_time()
        if self._socket.poll(0 if is_busy else IDLE_POLL_MS):
            self._receive()
        if self._engine.has_work:
            self._sort(self._engine.step())
        self._publish()

    def _receive(self) -> None:
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(identity, self._read(frames))
            except WireError as exc:
                log.error("disconnecting a frontend: %s", exc)
                self._disconnect(identity, str(exc))

    def _handle(self, identity: bytes, message: ToEngine) -> None:
        frontend = self._frontends.get(identity)
        match message:
            case Hello():
                self._drop(identity)
                self._frontends[identity] = _Frontend(identity=identity)
            case FrontendGone():
                self._drop(message.frontend.encode())
            case _ if frontend is None:
                self._disconnect(identity, "the engine does not know this frontend")
            case AbortRequest():
                if self._owners.get(message.request_id) is frontend:
                    self._engine.abort(message.request_id)
                    self._forget(message.request_id)
            case GetState():
                if not self._send(identity, self._engine.state()):
                    self._disconnect(identity, UNREAD)
            case Operate():
                if not self._send(identity, self._engine.run_operation(message)):
                    self._disconnect(identity, UNREAD)
            case AddRequest():
                self._add(frontend, message)

    def _add(self, frontend: _Frontend, message: AddRequest) -> None:
        refused = add_or_refuse(self._engine, message)
        frontend.updates.extend(refused)
        if not refused:
            self._owners[message.request_id] = frontend
            frontend.requests.add(message.request_id)

    def _sort(self, updates: Iterable[RequestUpdate]) -> None:
        for update in updates:
            frontend = self._owners.get(update.request_id)
            if frontend is None:
                continue  # aborted while the step ran
            frontend.updates.append(update)
            if update.finish_reason is not None:
                self._forget(update.request_id)

    def _publish(self) -> None:
        for identity, reason in list(self._dropped.items()):
            if self._send(identity, Disconnected(reason=reason)):
                self._dropped.pop(identity, None)  # gone already if the frontend is
        if not self._frontends:
            return
        stats, now = self._engine.stats(), time.monotonic()
        for frontend in list(self._frontends.values()):
            # If it has requests, it gets a message every turn, which also shows that the engine is
            # alive.
            is_quiet = not frontend.updates and (not frontend.requests or not self._engine.has_work)
            is_recent = now - frontend.sent_at < IDLE_STATS_S
            if is_quiet and (frontend.sent_stats == stats or is_recent):
                continue
            outputs = EngineOutputs(updates=frontend.updates, stats=stats)
            if self._send(frontend.identity, outputs):
                frontend.updates, frontend.sent_stats, frontend.sent_at = [], stats, now
            else:
                self._disconnect(frontend.identity, UNREAD)

    def _send(self, identity: bytes, message: FromEngine) -> bool:
        """Send a message. Returns False if the frontend has read too little."""
        try:
            self._socket.send_multipart([identity, *pack(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(identity)
        return True

    def _disconnect(self, identity: bytes, reason: str) -> None:
        self._drop(identity)
        self._dropped[identity] = reason

    def _drop(self, identity: bytes) -> None:
        """Forget a frontend, and abort its requests."""
        self._dropped.pop(identity, None)
        frontend = self._frontends.pop(identity, None)
        for request_id in list(frontend.requests) if frontend is not None else ():
            self._engine.abort(request_id)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._owners.pop(request_id).requests.discard(request_id)


def bind(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The engine's socket at `address`."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise errors instead of silently dropping messages
    socket.setsockopt(zmq.SNDHWM, MAX_UNREAD)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket
