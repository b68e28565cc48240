"""Threads beside the main one that end before the interpreter does.

A daemon thread that is inside torch while Python goes away ends the process with an abort: at its
next need of the interpreter's lock its stack is unwound, through C++ functions that may not throw.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable

_LONGEST_S = 10.0  # waited at exit; a thread that is blocked outside of Python is left to be


class BackgroundThread(threading.Thread):
    """A daemon that `stop` asks to end at the interpreter's exit, which waits for it.

    Without `stop`, SystemExit is raised in it between two instructions of its Python code.
    """

    def __init__(
        self, run: Callable[[], None], name: str, *, stop: Callable[[], None] | None = None
    ) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.ask_to_end = stop or self._interrupt

    def _interrupt(self) -> None:
        if self.ident is not None:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit))


@atexit.register
def _end_all() -> None:
    threads = [one for one in threading.enumerate() if isinstance(one, BackgroundThread)]
    for thread in threads:  # all at once: one may wait for another
        thread.ask_to_end()
    end = time.monotonic() + _LONGEST_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
