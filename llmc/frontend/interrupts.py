"""Ctrl-C between two steps of the engine and not inside one.

KeyboardInterrupt is raised between any two bytecodes. In the middle of a step it would leave a
scheduler whose plan and runner disagree, and an LLM that a notebook can't use again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the block has ended. Python raises it in the main thread alone."""
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
