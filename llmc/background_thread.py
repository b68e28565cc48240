"""Background threads that end before the interpreter does.

A daemon thread that is inside torch while Python shuts down aborts the process: the next time it
needs the GIL, its stack is unwound, through C++ functions that must not throw.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable

_LONGEST_S = 10.0  # longest wait at exit; a thread blocked outside Python is abandoned


class BackgroundThread(threading.Thread):
    """A daemon thread that the interpreter stops with `stop` at exit, and waits for.

    Without `stop`, SystemExit is raised in it between two Python instructions.
    """

    def __init__(
        self, run: Callable[[], None], name: str, *, stop: Callable[[], None] | None = None
    ) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.request_stop = stop or self._interrupt

    def _interrupt(self) -> None:
        if self.ident is not None:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit))


@atexit.register
def _end_all() -> None:
    threads = [one for one in threading.enumerate() if isinstance(one, BackgroundThread)]
    for thread in threads:  # ask all first: one may be waiting for another
        thread.request_stop()
    end = time.monotonic() + _LONGEST_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
