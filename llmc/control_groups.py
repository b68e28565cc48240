"""Linux control groups, by which containers limit cores and memory: version 1 or 2."""

from __future__ import annotations

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
