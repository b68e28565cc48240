"""The number of compute threads: the available cores, by affinity and by quota.

torch counts the cores that the process is allowed to run on. A container's CPU quota limits time,
not cores: with more threads than that, all are throttled together for a part of every period, and
each product waits for the last thread.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from llmc.control_groups import group_folders

_log = logging.getLogger(__name__)


def quota_cores(root: Path = Path("/")) -> float | None:
    """The CPU quota of Linux control groups in cores: the minimum over the hierarchy.

    None if there is no limit. `root` is the folder that contains /proc and /sys.
    """
    found = [_quota(folder) for folder in group_folders("cpu", root)]
    limits = [cores for cores in found if cores is not None]
    return min(limits, default=None)


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None


def throttled_seconds(root: Path = Path("/")) -> float:
    """Seconds for which the quota has stopped this process's control groups: the maximum over the
    hierarchy, each counting the time of all cores. 0 if there is no limit."""
    return max(map(_throttled, group_folders("cpu", root)), default=0.0)


def _throttled(folder: Path) -> float:
    try:
        lines = (folder / "cpu.stat").read_text().splitlines()
        counters = {name: int(value) for name, value in map(str.split, lines)}
    except (OSError, ValueError):
        return 0.0
    return counters.get("throttled_usec", 0) / 1e6 + counters.get("throttled_time", 0) / 1e9


def limit_threads() -> None:
    """Limit torch's number of threads, which we use too, to the quota, unless the user has set
    OMP_NUM_THREADS."""
    cores = quota_cores()
    if cores is None or "OMP_NUM_THREADS" in os.environ:
        return
    threads = max(1, int(cores))
    if threads < torch.get_num_threads():
        _log.info("using %d threads: this container has a quota of %.3g cores", threads, cores)
        torch.set_num_threads(threads)
