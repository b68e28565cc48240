"""How many threads compute: as many as there are cores to be had, by affinity and by quota.

torch counts the cores that the process may run on. A container's quota of CPU time is no count of
cores: threads beyond it are stopped together for a part of every period, and each product waits
for the last of them.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

_log = logging.getLogger(__name__)


def quota_cores(root: Path = Path("/")) -> float | None:
    """The cores' worth of time that Linux control groups grant, the least of all levels.

    None where nothing limits it. `root` is where /proc and /sys lie.
    """
    found = [_quota(folder) for folder in _groups(root)]
    limits = [cores for cores in found if cores is not None]
    return min(limits, default=None)


def _groups(root: Path) -> list[Path]:
    """Folders of this process's group and of those above it, of either version of the interface."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        inner = Path(path.lstrip("/"))
        folders += [mount / inner, *(mount / parent for parent in inner.parents)]
    return folders


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


def limit_threads() -> None:
    """Let torch's threads, which are ours too, be no more than the quota; a number that the user
    gave in OMP_NUM_THREADS stays."""
    cores = quota_cores()
    if cores is None or "OMP_NUM_THREADS" in os.environ:
        return
    threads = max(1, int(cores))
    if threads < torch.get_num_threads():
        _log.info("%d threads, since this container may use %.3g cores", threads, cores)
        torch.set_num_threads(threads)
