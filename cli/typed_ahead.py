"""Keep keys that are typed while a model loads or answers off the screen, for the next prompt."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """While active, the terminal does not echo keys but buffers them; Ctrl-C works as usual."""
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
