"""Linux control groups, by which containers limit cores and memory: version 1 or 2."""

from __future__ import annotations

import math
import os
from pathlib import Path


def group_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """The folders of this process's group and its ancestors that `controller`, such as "cpu" or
    "memory", can have files in; none without control groups.

    `root` is the folder that contains /proc and /sys.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = Path(path.lstrip("/"))
        folders += [mount / inner, *(mount / parent for parent in inner.parents)]
    return folders


def available_cores() -> int:
    """Cores that this process can keep busy: those it may run on, and no more than its quota."""
    may = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if may else os.cpu_count() or 1
    quota = quota_cores()
    return cores if quota is None else min(cores, max(1, math.ceil(quota)))


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
    counters = read_counters(folder / "cpu.stat")
    return counters.get("throttled_usec", 0) / 1e6 + counters.get("throttled_time", 0) / 1e9


def read_counters(file: Path) -> dict[str, int]:
    """The numbers of a group's `*.stat` file by name; none if there is no such file, or another."""
    try:
        lines = file.read_text().splitlines()
        return {name: int(value) for name, value in map(str.split, lines)}
    except (OSError, ValueError):
        return {}
