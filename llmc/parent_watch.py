"""Setup and end of a child process: leave signals to the parent, die with the parent, exit at once.

Used by the engine process, its ranks and the additional API processes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM. Ctrl-C reaches all processes of a terminal, but the main one
    decides how to drain."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def die_with_parent() -> None:
    """Linux: have this process killed 3 s after its parent's death, even if it hangs in C.

    The signal handler is libc's own alarm(), which gets the signal's number as its argument, and
    SIGQUIT's is 3. Until then the process can exit in an orderly way when its standard input ends.
    For Linux, the parent is the thread that started this process.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGQUIT, libc.alarm)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)


def leave(code: int) -> NoReturn:
    """Exit without interpreter shutdown, which takes about a second with torch loaded and aborts
    the process while a thread reads standard input.

    It is not needed: sockets are closed, and children exit when their pipes are closed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
