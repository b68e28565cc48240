"""Runs one generation call: submit, respond with JSON or a stream, abort if the client disconnects.

client disconnects ---> work cancelled -> requests aborted -> blocks freed
reader stalled -------> the same: the connection is then aborted (`Connection` in run.py)
error before the first token -> an HTTP status;  after it -> an error event in the stream
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from llmc.async_llm import AsyncLLM, Stream
from llmc.errors import QueueFullError
from llmc.frontend.completion import CompletionDelta
from llmc.frontend.inputs import Input
from llmc.server.call_observer import CallObserver
from llmc.server.errors import ApiError, as_api_error, dump_json, error_body, json_response
from llmc.server.guard import CLIENT_CLOSED
from llmc.server.metrics import Metrics, Watch
from llmc.server.settings import ServerSettings

Deltas = Sequence[tuple[int, CompletionDelta]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How a protocol encodes the events of a stream."""

    event: Callable[[dict[str, Any]], bytes]
    error: Callable[[ApiError], dict[str, Any]]  # the event for an error once the stream started
    media_type: bytes = b"text/event-stream; charset=utf-8"
    keep_alive: bytes = b": keep-alive\n\n"
    done: bytes = b""


def unnamed_event(value: dict[str, Any]) -> bytes:
    return b"data: " + dump_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """A server-sent event named after its `type`."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\n" + unnamed_event(value)


OPENAI = Wire(event=unnamed_event, error=error_body, done=b"data: [DONE]\n\n")


class Call(Protocol):
    """The protocol-specific part: how the response is built, and how a stream is encoded."""

    sources: Sequence[Input]
    stream: bool
    wire: Wire

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        """Events for new deltas."""

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        """Events after the end, such as the usage."""

    def body(self, stream: Stream) -> Any:
        """The whole response of a call that does not stream, as JSON."""


@contextlib.contextmanager
def preparing(request: Request, *, submits: bool = True) -> Iterator[None]:
    """Surrounds the preparation of a call, as `AsyncLLM.preparing` does."""
    llm: AsyncLLM = request.app.state.llm
    with counting_rejections(request.app.state.metrics), llm.preparing(submits=submits):
        yield


@contextlib.contextmanager
def counting_rejections(metrics: Metrics) -> Iterator[None]:
    try:
        yield
    except QueueFullError:
        metrics.rejected("queue_full")
        raise


class GenerationResponse:
    """The ASGI response of a generation call; the request runs while it is being sent."""

    def __init__(
        self,
        llm: AsyncLLM,
        call: Call,
        settings: ServerSettings,
        metrics: Metrics,
        *,
        priority: int = 0,
    ) -> None:
        self._llm = llm
        self._priority = priority
        self._call = call
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventSender(send, self._call.wire)
        self._observer = CallObserver.of(scope)
        if self._call.stream:
            work = asyncio.create_task(self._stream(events))
        else:
            work = asyncio.create_task(self._answer(scope, receive, send))
        ends = {work, asyncio.create_task(disconnected(receive))}
        if self._call.stream:
            ends.add(asyncio.create_task(events.keep_alive(self._settings)))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # the client disconnected
                scope["state"]["log_status"] = CLIENT_CLOSED
        finally:
            for task in ends:
                task.cancel()
            try:
                await asyncio.wait(ends)
            finally:  # also if this call is cancelled, as those of a batch are
                is_over = work.done() and not work.cancelled()
                error = work.exception() if is_over else None
                self._observer.close(error)
        if is_over:
            with counting_rejections(self._metrics):
                work.result()

    @contextlib.asynccontextmanager
    async def _submitted(self) -> AsyncIterator[tuple[Stream, Watch]]:
        interval = self._settings.stream_interval
        async with self._llm.submit(
            *self._call.sources,
            request_id=self._observer.engine_id(),
            priority=self._priority,
            stream_interval=interval,
        ) as stream:
            watch = self._metrics.watch(stream)
            self._observer.begin(stream)
            try:
                yield stream, watch
            finally:
                watch.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._submitted() as (stream, watch):
            while deltas := await stream.deltas():
                watch.saw(deltas)
                _check(stream)
            response = json_response(self._call.body(stream))
        await response(scope, receive, send)

    async def _stream(self, events: EventSender) -> None:
        async with self._submitted() as (stream, watch):
            try:
                while deltas := await stream.deltas():
                    watch.saw(deltas)
                    _check(stream)
                    await events.send(self._call.chunks(stream, deltas))
                await events.send(self._call.last_chunks(stream))
            except Exception as exc:
                if not events.started:
                    raise  # nothing was sent yet, so the error can still set the HTTP status
                await events.send([self._call.wire.error(as_api_error(exc))])
        await events.done()


class EventSender:
    """Sends events to one reader, which may disconnect after a long silence.

    A separate timer prevents that (`keep_alive`): a timeout around every event would cost more than
    the event itself.
    """

    def __init__(self, send: Send, wire: Wire) -> None:
        self._send = send
        self._wire = wire
        self._headers = [
            (b"content-type", wire.media_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self._last = time.monotonic()
        self._pending = 0  # sends not completed yet
        self.started = False

    async def send(self, events: Iterable[dict[str, Any]]) -> None:
        await self._write(b"".join(map(self._wire.event, events)))

    async def done(self) -> None:
        await self._write(self._wire.done, more=False)

    async def keep_alive(self, settings: ServerSettings) -> None:
        """Send a comment after each long silence."""
        while True:
            await asyncio.sleep(settings.keep_alive_s / 4)
            is_quiet = time.monotonic() - self._last >= settings.keep_alive_s
            if is_quiet and not self._pending:
                await self._write(self._wire.keep_alive)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        if not body and more:
            return
        self._last = time.monotonic()
        self._pending += 1
        if not self.started:
            self.started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._pending -= 1
        self._last = time.monotonic()


def _check(stream: Stream) -> None:
    if stream.error is not None:
        if stream.is_refused:
            raise ApiError(400, stream.error)
        raise ApiError(500, stream.error, code="engine_error")


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
