"""How much of the machine's memory this process may use, with the limits of its container."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from llmc.control_groups import group_folders, read_counters


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """In bytes. `available`: what can be used without swapping."""

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The machine's memory, or less if a control group of this process is limited to less: a
    process that exceeds the limit is killed. `root` is the folder that contains /proc and /sys."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for folder in group_folders("memory", root):
        limits = [
            limit
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            if (limit := _number(folder / name)) is not None
        ]
        total = min(total, *limits) if limits else total
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limits and used is not None:
            available = min(available, max(0, min(limits) - used + _reclaimable(folder)))
    return HostMemory(total=total, available=min(available, total))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _reclaimable(folder: Path) -> int:
    """Bytes of files that were read or written and are no longer in use; the kernel takes them back
    before a group reaches its limit."""
    counters = read_counters(folder / "memory.stat")
    # version 1 counts those of the groups within under the second name
    return counters.get("total_inactive_file", counters.get("inactive_file", 0))
