"""GET /v1/engine/events: the engine's state as server-sent events, while there are listeners.

    listeners <--- one event for all --- EngineFeed --GetState--> engine

Without listeners nothing is computed. There is an event every INTERVAL_S, or less often if
collecting the state would take more than COST_SHARE of the engine's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from llmc.async_llm import AsyncLLM
from llmc.errors import EngineDeadError
from llmc.server.errors import ApiError, as_api_error, error_body
from llmc.server.respond import EventSender, Wire, disconnected, unnamed_event
from llmc.server.settings import ServerSettings

MAX_LISTENERS = 16  # per API process
INTERVAL_S = 0.5
COST_SHARE = 0.004

_WIRE = Wire(event=unnamed_event, error=error_body)


async def engine_events(request: Request) -> EngineEventsResponse:
    """The engine's state, about twice a second, as server-sent events."""
    state = request.app.state
    return EngineEventsResponse(state.engine_feed, state.llm, state.settings)


class EngineFeed:
    """Asks the engine for its state on behalf of all listeners of this process."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._num_listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[dict[str, Any]] | None = None

    @contextlib.contextmanager
    def listen(self) -> Iterator[AsyncIterator[dict[str, Any]]]:
        """The events from now on; a slow listener misses some. ApiError if there are too many
        listeners."""
        if self._num_listeners >= MAX_LISTENERS:
            raise ApiError(
                429,
                f"{MAX_LISTENERS} clients are already listening to the engine; close one of them",
                code="too_many_listeners",
            )
        self._num_listeners += 1
        if self._task is None:
            self._next = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run())
        try:
            yield self._events()
        finally:
            self._num_listeners -= 1
            if not self._num_listeners:
                self._task.cancel()
                self._task = None

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        while self._next is not None:
            yield await asyncio.shield(self._next)

    async def _run(self) -> None:
        while True:
            event, pause_s = await self._read()
            waiting, self._next = self._next, asyncio.get_running_loop().create_future()
            if waiting is not None:
                waiting.set_result(event)
            await asyncio.sleep(pause_s)

    async def _read(self) -> tuple[dict[str, Any], float]:
        """An event, and the seconds to wait before the next."""
        try:
            state = await self._llm.engine_state()
        except EngineDeadError as exc:  # it may be restarted
            return error_body(as_api_error(exc)), INTERVAL_S
        return dataclasses.asdict(state), max(INTERVAL_S, state.collect_s / COST_SHARE)


class EngineEventsResponse:
    """The ASGI response: events until the client disconnects or the server shuts down."""

    def __init__(self, feed: EngineFeed, llm: AsyncLLM, settings: ServerSettings) -> None:
        self._feed = feed
        self._llm = llm
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventSender(send, _WIRE)
        with self._feed.listen() as listener:
            ends = {
                work := asyncio.create_task(self._send(events, listener)),
                asyncio.create_task(disconnected(receive)),
                asyncio.create_task(events.keep_alive(self._settings)),
            }
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in ends:
                    task.cancel()
                await asyncio.wait(ends)
        if not work.cancelled():
            work.result()

    async def _send(self, events: EventSender, listener: AsyncIterator[dict[str, Any]]) -> None:
        async for event in listener:
            await events.send([event])
            if self._llm.is_draining:
                break
        await events.done()
