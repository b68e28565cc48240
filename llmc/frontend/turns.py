"""A lock whose waiting callers take turns, so that one of them can't hold up the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextvars import ContextVar

CALLER: ContextVar[str] = ContextVar("caller", default="")  # who sent the current request


class Turns:
    """A lock for one event loop. A caller's own waits are in order of arrival."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # next first

    @contextlib.asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for the caller's turn, which lasts until the block ends."""
        if self._is_held:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(caller, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it had just been given
                    self._pass_on()
                raise
        self._is_held = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the first caller that waits, who is then the last in line."""
        while self._waiting:
            caller, own = self._waiting.popitem(last=False)
            turn = own.popleft()
            if own:
                self._waiting[caller] = own
            if not turn.done():  # otherwise it was cancelled
                turn.set_result(None)
                return
        self._is_held = False
