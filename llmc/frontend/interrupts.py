"""Defers Ctrl-C to between two steps of the engine.

KeyboardInterrupt can be raised between any two bytecodes. In the middle of a step it would leave
the scheduler and the runner inconsistent, and the LLM unusable for the rest of a notebook session.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C until the end of the block. Python raises it in the main thread only."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(*waiting[0])
