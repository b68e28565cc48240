"""Defers Ctrl-C to between two steps of the engine.

KeyboardInterrupt can be raised between any two bytecodes. In the middle of a step it would leave
the scheduler and the runner inconsistent, and the LLM unusable for the rest of a notebook session.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def _nothing() -> None: ...


@contextmanager
def uninterrupted() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C until the end of the block, or until the block calls the function it is given.

    Python raises it in the main thread only.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield _nothing
        return
    waiting: list[tuple[int, FrameType | None]] = []

    def check() -> None:
        if waiting:
            number, frame = waiting[0]
            waiting.clear()
            before(number, frame)

    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
        check()
