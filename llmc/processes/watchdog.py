"""Logs once where a stalled engine hangs, by writing the stacks of its threads to stderr.

/ready reports the stall by the same criterion; the stacks are for those who then read the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

PAUSE_S = 1.0  # between two checks of a stalled engine


class Watchdog:
    """Checks whenever the engine could have stalled; idle while there are no requests."""

    def __init__(
        self, seconds_left: Callable[[], float | None], dump_stacks: Callable[[], None]
    ) -> None:
        """`seconds_left` until the engine counts as stalled; None while it has nothing to do."""
        self._seconds_left = seconds_left
        self._dump_stacks = dump_stacks
        self._timer: asyncio.TimerHandle | None = None
        self._has_reported = False

    def watch(self) -> None:
        """Called in the event loop when an idle engine gets work."""
        self.stop()
        self._has_reported = False
        self._check()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        left = self._seconds_left()
        if left is None:
            return
        if left > 0:
            self._has_reported = False
        elif not self._has_reported:
            self._has_reported = True
            log.error("the engine makes no progress while requests wait; stacks of its threads:")
            self._dump_stacks()
        pause = left if left > 0 else PAUSE_S
        self._timer = asyncio.get_running_loop().call_later(pause, self._check)
