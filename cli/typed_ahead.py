"""Keys that are typed while a model loads or answers: not shown, and there for the next prompt."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """Inside, the terminal shows no keys. They wait in its buffer; Ctrl-C works as ever."""
    try:
        import termios
    except ImportError:  # no POSIX terminal
        yield
        return
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, AttributeError, termios.error):  # a pipe, or replaced by a test
        yield
        return
    quiet = [*before]
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
