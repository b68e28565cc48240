"""`Stream`: requests that were submitted together, and their single reader.

An update wakes the reader, which gets everything that has accumulated, so nothing queues up for a
slow reader. With an interval, it is only woken once that many tokens are available.
"""

from __future__ import annotations

import asyncio

from llmc.errors import EngineDeadError
from llmc.frontend.completion import Completion, CompletionDelta, Cursor
from llmc.frontend.outputs import ActiveRequest


class Stream:
    """Created by `AsyncLLM.submit`. `interval`: tokens of one completion between two deltas."""

    def __init__(self, interval: int = 1) -> None:
        self.requests: list[ActiveRequest] = []
        self._interval = interval
        self._wake = asyncio.Event()
        self._lost: EngineDeadError | None = None
        self._readers: dict[str, list[tuple[int, Completion, Cursor]]] = {}

    @property
    def error(self) -> str | None:
        """Why a single request failed. The others continue."""
        return next((r.error for r in self.requests if r.error is not None), None)

    @property
    def is_refused(self) -> bool:
        """Whether that error is the caller's."""
        return any(r.is_refused for r in self.requests)

    async def deltas(self) -> list[tuple[int, CompletionDelta]]:
        """Wait for new output: pairs of a request's index in `requests` and its delta.

        Empty at the end. A single request that fails ends with finish_reason "error"; if the whole
        engine has stopped, EngineDeadError is raised. Can be cancelled and called again.
        """
        while True:
            if self._lost is not None:
                raise self._lost
            self._wake.clear()
            found = [
                (index, delta)
                for readers in self._readers.values()
                for index, completion, cursor in readers
                if self._is_due(completion, cursor)
                and (delta := completion.delta(cursor)) is not None
            ]
            if found or all(request.finished for request in self.requests):
                return found
            await self._wake.wait()

    # ---- for AsyncLLM ----

    def add(self, request: ActiveRequest) -> None:
        index = len(self.requests)
        self.requests.append(request)
        self._readers[request.request_id] = [
            (index, completion, Cursor()) for completion in request.completions
        ]

    def notify(self, request: ActiveRequest) -> None:
        """Wake the reader if `request` has changed enough."""
        if request.finished or any(
            self._is_due(completion, cursor)
            for _, completion, cursor in self._readers[request.request_id]
        ):
            self._wake.set()

    def lose(self, error: EngineDeadError) -> None:
        """The engine has stopped, and all requests are lost."""
        self._lost = error
        self._wake.set()

    def _is_due(self, completion: Completion, cursor: Cursor) -> bool:
        """Whether to deliver a delta now. The first token and the end are delivered at once."""
        if completion.finish_reason is not None:
            return not cursor.finished
        new = len(completion.token_ids) - cursor.tokens
        return new >= self._interval or (new > 0 and cursor.tokens == 0)
