"""Runs one generation call: submit, wait, answer as JSON or as a stream, abort when nobody reads.

client gone ----------> work cancelled -> requests aborted -> blocks free
reader stalled -------> the same after `stalled_reader_s`
error before the first token -> its own HTTP status;  after it -> an error event in the stream
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from llmc.async_llm import AsyncLLM, Stream
from llmc.errors import QueueFullError
from llmc.front.inputs import Input
from llmc.front.outputs import CompletionDelta
from llmc.server.errors import ApiError, as_api_error, dump_json, error_body, json_response
from llmc.server.guard import CLIENT_CLOSED
from llmc.server.metrics import Metrics
from llmc.server.settings import ServerSettings

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Deltas = Sequence[tuple[int, CompletionDelta]]


class Call(Protocol):
    """What differs between chat and plain completions: how the answer is written down."""

    sources: Sequence[Input]
    stream: bool

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        """Events for what is new."""

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        """Events after the end, such as the usage."""

    def body(self, stream: Stream) -> dict[str, Any]:
        """The whole answer of a call that does not stream."""


class GenerationResponse:
    """The ASGI response of a generation call; the request runs while it is being sent."""

    def __init__(
        self, llm: AsyncLLM, call: Call, settings: ServerSettings, metrics: Metrics
    ) -> None:
        self._llm = llm
        self._call = call
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                scope["state"]["log_status"] = CLIENT_CLOSED
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            self._note(work.exception())
            work.result()

    def _note(self, error: BaseException | None) -> None:
        if isinstance(error, QueueFullError):
            self._metrics.rejected("queue_full")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._llm.submit(*self._call.sources) as stream:
            watch = self._metrics.watch(stream)
            try:
                if self._call.stream:
                    await self._stream(stream, watch.saw, send, scope)
                else:
                    while deltas := await stream.deltas():
                        watch.saw(deltas)
                        _check(stream)
                    response = json_response(self._call.body(stream))
                    await response(scope, receive, send)
            finally:
                watch.close()

    async def _stream(self, stream: Stream, saw: Any, send: Send, scope: Scope) -> None:
        deltas = await self._next(stream)
        _check(stream)  # nothing is sent yet, so this still becomes a status
        if not await self._send(
            send, {"type": "http.response.start", "status": 200, "headers": SSE_HEADERS}
        ):
            return
        try:
            while deltas is None or deltas:
                if deltas is None:
                    text = KEEP_ALIVE
                else:
                    saw(deltas)
                    text = b"".join(map(_event, self._call.chunks(stream, deltas)))
                if text and not await self._send_body(send, text, more=True):
                    scope["state"]["log_status"] = CLIENT_CLOSED
                    return
                deltas = await self._next(stream)
                _check(stream)
            tail = b"".join(map(_event, self._call.last_chunks(stream)))
        except Exception as exc:
            # The status is out; a client learns of the failure from the stream itself.
            tail = _event(error_body(as_api_error(exc)))
        await self._send_body(send, tail + DONE, more=False)

    async def _next(self, stream: Stream) -> Deltas | None:
        """The next deltas; None when it has been quiet for so long that a comment is due."""
        try:
            async with asyncio.timeout(self._settings.keep_alive_s):
                return await stream.deltas()
        except TimeoutError:
            return None

    async def _send_body(self, send: Send, body: bytes, *, more: bool) -> bool:
        return await self._send(
            send, {"type": "http.response.body", "body": body, "more_body": more}
        )

    async def _send(self, send: Send, message: Any) -> bool:
        """False when the reader has taken nothing for too long; the request is then given up."""
        try:
            async with asyncio.timeout(self._settings.stalled_reader_s):
                await send(message)
        except TimeoutError:
            return False
        return True


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + dump_json(value) + b"\n\n"


def _check(stream: Stream) -> None:
    if stream.error is not None:
        raise ApiError(500, stream.error, code="engine_error")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
