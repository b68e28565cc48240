"""Logs once that steps on CPU take far longer than this machine needs for them, and why.

What a step needs is measured as it runs: the CPU time of the thread that leads it, or the time of
the fastest step of the same size, if that is shorter. In the rest of the time, that thread was
ready but had no core, or waited for memory to be read from disk, or computed more slowly.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from llmc.control_groups import throttled_seconds
from llmc.engine.plan import StepPlan

log = logging.getLogger(__name__)
T = TypeVar("T")

_FACTOR = 3  # steps that take this many times the time that they need are far too slow
_WINDOW_S = 2.0  # of steps that are judged together, besides the longest: pauses happen
_MANY_FAULTS = 100  # pages read from disk, per second
_MAX_SIZES = 1024  # whose fastest step is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What has held up this thread since it started, and its container and process.

    `cores`: seconds in which it was ready to run but had no core. `quota`: seconds in which the
    container had used up its quota. `faults`: pages of this process that were read from disk.
    """

    cores: float
    quota: float
    faults: int

    def since(self, earlier: Waits) -> Waits:
        return Waits(
            cores=self.cores - earlier.cores,
            quota=self.quota - earlier.quota,
            faults=self.faults - earlier.faults,
        )


def read_waits(root: Path = Path("/")) -> Waits:
    """Read the kernel's counters. Those that the system does not have are 0."""
    try:
        cores = int((root / "proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        cores = 0.0
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return Waits(cores=cores, quota=throttled_seconds(root), faults=faults)


def size_of(plan: StepPlan) -> Hashable:
    """What the time of a decode step depends on: its rows, and the power of 2 of all their
    contexts. None for other steps, of which there are too many kinds to compare them."""
    if not plan.is_decode:
        return None
    return len(plan.work), sum(work.start for work in plan.work).bit_length()


class SlowSteps:
    """Times the steps of one thread. Of all of a process, the first that finds a cause logs it."""

    is_logged: ClassVar[bool] = False

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        thread_clock: Callable[[], float] = time.thread_time,
        read: Callable[[], Waits] = read_waits,
    ) -> None:
        self._clock, self._thread_clock, self._read = clock, thread_clock, read
        self._fastest: dict[Hashable, float] = {}  # seconds, by size
        self._begin_window(None)

    def _begin_window(self, waits: Waits | None) -> None:
        self._waits = waits
        self._took = self._used = self._needed = 0.0
        self._longest = (0.0, 0.0, 0.0)  # the same of the longest step

    def run(self, step: Callable[[], T], size: Hashable = None) -> T:
        """`step()`. Steps of the same `size`, unless it is None, need the same time."""
        if SlowSteps.is_logged:
            return step()
        if self._waits is None:
            self._waits = self._read()
        start, used = self._clock(), self._thread_clock()
        result = step()
        took, used = self._clock() - start, self._thread_clock() - used
        needed = min(used, self._least(size, took))
        self._took += took
        self._used += used
        self._needed += needed
        self._longest = max(self._longest, (took, used, needed))
        if self._took - self._longest[0] >= _WINDOW_S:
            self._judge()
        return result

    def _least(self, size: Hashable, took: float) -> float:
        """What the fastest step of this size took, including this one."""
        if size is None:
            return took
        if len(self._fastest) >= _MAX_SIZES:
            self._fastest.clear()
        self._fastest[size] = least = min(took, self._fastest.get(size, took))
        return least

    def _judge(self) -> None:
        waits, cause = self._read(), None
        took = self._took - self._longest[0]
        used = self._used - self._longest[1]
        needed = max(self._needed - self._longest[2], 1e-3)
        if self._waits is not None and took >= _FACTOR * needed:
            cause = _cause(waits.since(self._waits), took - needed, used - needed)
        if cause is not None:
            SlowSteps.is_logged = True
            log.warning("steps take %.0f times as long as they need: %s", took / needed, cause)
        self._begin_window(waits)


def _cause(waits: Waits, lost: float, slower: float) -> str | None:
    """What explains most of the `lost` seconds, and what to do; None if nothing is known to.
    `slower`: how many of them the thread computed."""
    if waits.quota >= lost / 2:  # the time without a core includes it
        return (
            "this container uses up its CPU quota; raise it, or set OMP_NUM_THREADS to fewer "
            "threads than the quota has cores"
        )
    if waits.cores >= lost / 2:
        return (
            f"other programs use the cores (the load average is {os.getloadavg()[0]:.1f}); end "
            "them, or give llmc cores of its own"
        )
    if waits.faults >= _MANY_FAULTS * lost:
        return (
            f"{waits.faults} pages of its memory had to be read from disk; use a smaller model, "
            "--quantization or --kv-cache-memory, or end what else uses the memory"
        )
    if slower >= lost / 2:
        return (
            "the same steps were faster before, so other programs or virtual machines now use "
            "the memory's bandwidth, or the processor has lowered its clock; end what else runs, "
            "or look at temperature and power limits"
        )
    return None
