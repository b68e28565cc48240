"""The frontend's side of the process boundary: a link to the current engine process.

    AsyncLLM --send--> DEALER --AddRequest, AbortRequest, GetState, Operate--> engine process
             <--publish-- DEALER <--- EngineOutputs, EngineState, OperationResult ---

Everything runs in the event loop. The process watch reports which engine is running. Each engine
gets a new socket, so that nothing sent to a dead engine reaches the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import zmq

from llmc.engine.messages import EngineOutputs, EngineState, OperationResult
from llmc.frontend.engine_link import (
    EngineLost,
    EngineStarted,
    Message,
    Processes,
    Publish,
)
from llmc.processes.server_processes import EngineUp, ProcessWatch, ServerProcesses
from llmc.processes.wire import (
    TO_FRONTEND,
    Disconnected,
    FrontendGone,
    Hello,
    Unpacker,
    WireError,
    pack,
)

log = logging.getLogger(__name__)


class RemoteEngine:
    """An EngineLink to an engine process. `name` is unique among the frontends of a server."""

    def __init__(self, name: str, watcher: ProcessWatch) -> None:
        self._name = name
        self._watcher = watcher
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._engine: EngineUp | None = None
        self._read: Unpacker[EngineOutputs | EngineState | OperationResult | Disconnected] = (
            Unpacker(TO_FRONTEND)
        )
        self._num_gone = 0
        self._is_closed = False
        self._processes = ServerProcesses()

    def open(self, publish: Publish) -> None:
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._change(self._watcher.watch(self._on_change))

    def send(self, message: Message) -> None:
        self._write(message)

    has_idle_engine = False  # there is one engine

    def dump_stacks(self) -> None:
        self._watcher.dump_stacks()

    def processes(self) -> Processes:
        return Processes(pids=self._processes.pids, restarts=self._processes.restarts)

    async def close(self) -> None:
        self._is_closed = True
        self._disconnect()
        self._context.term()

    # ---- which engine runs ----

    def _on_change(self, processes: ServerProcesses) -> None:
        """Can be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there are no readers
            self._loop.call_soon_threadsafe(self._change, processes)

    def _change(self, processes: ServerProcesses) -> None:
        if self._is_closed:
            return
        self._processes = processes
        if processes.engine is None:
            if self._engine is not None or processes.is_over:
                self._disconnect()
                self._publish(
                    EngineLost(
                        reason=processes.why,
                        is_final=processes.is_over,
                        is_asleep=processes.is_asleep,
                    )
                )
        elif self._engine is None or processes.engine.address != self._engine.address:
            self._connect(processes.engine)
        for frontend in processes.gone_frontends[self._num_gone :]:
            self._write(FrontendGone(frontend=frontend))
        self._num_gone = len(processes.gone_frontends)

    def _connect(self, engine: EngineUp) -> None:
        self._disconnect()
        self._engine = engine
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._name.encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(engine.address)
        self._socket = socket
        self._loop.add_reader(socket.fileno(), self._drain)
        self._write(Hello())
        self._publish(EngineStarted(info=engine.info, stats=engine.stats))

    def _disconnect(self) -> None:
        socket, self._socket, self._engine = self._socket, None, None
        if socket is not None:
            self._loop.remove_reader(socket.fileno())
            socket.close()

    # ---- messages ----

    def _write(self, message: Hello | Message | FrontendGone) -> None:
        if self._socket is None:
            return  # there is no engine, and the requests are already lost
        self._socket.send_multipart(pack(message), zmq.NOBLOCK)
        # The file descriptor is edge-triggered, and sending may have consumed an edge.
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._read(frames)
            except WireError as exc:
                self._give_up(str(exc))
                return
            if isinstance(message, Disconnected):
                self._start_over(message.reason)
            else:
                self._publish(message)

    def _give_up(self, reason: str) -> None:
        """Stop: the engine's messages can't be read, and restarting would not change that."""
        log.error("the engine's messages can't be read: %s", reason)
        self._disconnect()
        self._is_closed = True
        self._publish(EngineLost(reason=reason, is_final=True))

    def _start_over(self, reason: str) -> None:
        """Reconnect after the engine dropped this frontend's requests; it accepts new ones."""
        log.error("the engine disconnected this frontend: %s", reason)
        engine = self._engine
        assert engine is not None, "it has just sent a message"
        self._publish(EngineLost(reason=reason, is_final=False))
        self._write(Hello())
        self._publish(EngineStarted(info=engine.info))
