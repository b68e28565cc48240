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
from typing import Generic, TypeVar

T = TypeVar("T")

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
            _raise_in(self.ident, SystemExit)


class Interruptible(Generic[T]):
    """A call that another thread can end, between two instructions of its Python code."""

    def __init__(self, do: Callable[[], T]) -> None:
        self._do = do
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._clock: int | None = None  # of the thread's CPU time
        self._began = 0.0
        self._is_ended = False

    @property
    def seconds(self) -> float:
        """The CPU time that it has taken so far: on a busy machine, its thread may have to wait."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock) - self._began

    def __call__(self) -> T:
        thread = threading.get_ident()
        with self._lock:
            if self._is_ended:
                raise SystemExit
            clock = time.pthread_getcpuclockid(thread)
            self._thread, self._began, self._clock = thread, time.clock_gettime(clock), clock
        try:
            return self._do()
        finally:
            with self._lock:
                self._thread = None
                if self._is_ended:  # must not be raised in what the thread does next
                    _raise_in(thread, None)

    def end(self) -> None:
        """Raise SystemExit in the call, now or when it begins."""
        with self._lock:
            self._is_ended = True
            if self._thread is not None:
                _raise_in(self._thread, SystemExit)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread; None cancels one that is not raised yet."""
    exception = ctypes.py_object() if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


@atexit.register
def _end_all() -> None:
    threads = [one for one in threading.enumerate() if isinstance(one, BackgroundThread)]
    for thread in threads:  # ask all first: one may be waiting for another
        thread.request_stop()
    end = time.monotonic() + _LONGEST_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
