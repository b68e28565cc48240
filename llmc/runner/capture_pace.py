"""When to capture a graph between two steps, although requests are waiting.

Graphs are captured while the engine is idle. One under constant load never is, and would run its
steps without graphs forever. So it captures one graph at a time between two steps, rarely enough
that streams of answers hardly notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0  # without an idle moment, before a capture delays a step
SHARE = 0.05  # of the time that captures take at most
_LEAST_PAUSE_S = 0.2  # between two looks for something to capture
LONG_S = 0.25  # about a step of the longest prompts; a capture that took longer is rare
LONG_PAUSE_S = 60.0


class CapturePace:
    """Captures take a twentieth of the time. After a long one, there is none for a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._idle_at = self._last_step = self._resume_at = clock()

    def on_idle(self) -> None:
        """The engine has an idle moment."""
        self._idle_at = self._clock()

    def is_due(self) -> bool:
        """Whether to capture before the step that is about to be launched. Ask before each step."""
        now = self._clock()
        if now - self._last_step > PATIENCE_S:  # it was idle, but was not told so
            self._idle_at = now
        self._last_step = now
        return now >= max(self._idle_at + PATIENCE_S, self._resume_at)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around a capture: determines when the next one is due."""
        start = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            took = end - start
            pause = LONG_PAUSE_S if took > LONG_S else max(took / SHARE, _LEAST_PAUSE_S)
            self._resume_at = end + pause
