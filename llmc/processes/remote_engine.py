"""The front's side of the process border: a link to the engine process that runs at the moment.

    AsyncLLM --send--> DEALER --Submit, Cancel--> engine process
             <--News-- DEALER <-- News ----------

All in the event loop. The process watcher says which engine is up; each engine gets its own
socket, so that nothing meant for a dead engine reaches the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import zmq

from llmc.engine.messages import AbortRequest
from llmc.frontend.engine_link import EngineNews, Message, Processes, Publish
from llmc.processes.server_processes import EngineUp, ProcessWatch, ServerProcesses
from llmc.processes.wire import (
    ENGINE_MESSAGES,
    Cancel,
    Gone,
    Hello,
    News,
    Submit,
    Unpacker,
    WireError,
    pack,
)

log = logging.getLogger(__name__)


class RemoteEngine:
    """`name` tells this front from the others of the same server."""

    def __init__(self, name: str, watcher: ProcessWatch) -> None:
        self._name = name
        self._watcher = watcher
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._engine: EngineUp | None = None
        self._read: Unpacker[ENGINE_MESSAGES] = Unpacker(ENGINE_MESSAGES)
        self._num_gone = 0
        self._is_closed = False
        self._processes = ServerProcesses()

    def open(self, publish: Publish) -> None:
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._change(self._watcher.watch(self._hear))

    def send(self, message: Message) -> None:
        if isinstance(message, AbortRequest):
            self._write(Cancel(message.request_id))
        else:
            self._write(Submit(message))

    def dump_stacks(self) -> None:
        self._watcher.dump_stacks()

    def processes(self) -> Processes:
        return Processes(pids=self._processes.pids, restarts=self._processes.restarts)

    async def close(self) -> None:
        self._is_closed = True
        self._disconnect()
        self._context.term()

    # ---- which engine there is ----

    def _hear(self, processes: ServerProcesses) -> None:
        """Called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._change, processes)

    def _change(self, processes: ServerProcesses) -> None:
        if self._is_closed:
            return
        self._processes = processes
        if processes.engine is None:
            if self._engine is not None or processes.is_over:
                self._disconnect()
                self._publish(EngineNews(dead=processes.why, is_final=processes.is_over))
        elif self._engine is None or processes.engine.address != self._engine.address:
            self._connect(processes.engine)
        for front in processes.gone_fronts[self._num_gone :]:
            self._write(Gone(front))
        self._num_gone = len(processes.gone_fronts)

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
        self._publish(EngineNews(started=engine.info, stats=engine.stats))

    def _disconnect(self) -> None:
        socket, self._socket, self._engine = self._socket, None, None
        if socket is not None:
            self._loop.remove_reader(socket.fileno())
            socket.close()

    # ---- messages ----

    def _write(self, message: Hello | Submit | Cancel | Gone) -> None:
        if self._socket is None:
            return  # there is no engine, and the requests are lost already
        self._socket.send_multipart(pack(message), zmq.NOBLOCK)
        # Its file descriptor tells of changes only, and sending may have taken note of one.
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
            if isinstance(message, News):
                self._publish(EngineNews(updates=message.updates, stats=message.stats))
            else:
                self._start_over(message.reason)

    def _give_up(self, reason: str) -> None:
        """What the engine says can't be read, and starting it again would not change that."""
        log.error("the engine can't be understood: %s", reason)
        self._disconnect()
        self._is_closed = True
        self._publish(EngineNews(dead=reason, is_final=True))

    def _start_over(self, reason: str) -> None:
        """The engine has dropped this front's requests; it takes new ones."""
        log.error("the engine refused this front: %s", reason)
        engine = self._engine
        assert engine is not None, "it has just said something"
        self._publish(EngineNews(dead=reason, is_final=False))
        self._write(Hello())
        self._publish(EngineNews(started=engine.info))
