"""Notices that the engine hangs, and writes down once where: the stacks of its threads on stderr.

/ready turns red by itself, from the same clock. This is for the person who then reads the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

PAUSE_S = 1.0  # between two looks at an engine that hangs


class Watchdog:
    """Looks again each time the engine could have stalled; asleep while nothing is asked of it."""

    def __init__(
        self, seconds_left: Callable[[], float | None], dump_stacks: Callable[[], None]
    ) -> None:
        """`seconds_left` until the engine counts as stalled; None while it has nothing to do."""
        self._seconds_left = seconds_left
        self._dump_stacks = dump_stacks
        self._timer: asyncio.TimerHandle | None = None
        self._has_barked = False

    def watch(self) -> None:
        """Called in the event loop when an idle engine gets work."""
        self.stop()
        self._has_barked = False
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        left = self._seconds_left()
        if left is None:
            return
        if left > 0:
            self._has_barked = False
        elif not self._has_barked:
            self._has_barked = True
            log.error("the engine makes no progress while requests wait; its threads stand here:")
            self._dump_stacks()
        pause = left if left > 0 else PAUSE_S
        self._timer = asyncio.get_running_loop().call_later(pause, self._look)
