"""The memory that a process may use: the machine's, within the limits of its control groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from control_group_files import write

from llmc.host_memory import HostMemory, host_memory

MIB = 2**20
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
STAT = "anon 1\ninactive_file {}\nactive_file 7\n"


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 8000, 5000),
        ({"proc/self/cgroup": "0::/\n"}, 8000, 5000),
        (
            {
                "proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": f"{4000 * MIB}\n",
                f"{V2}/memory.current": f"{1000 * MIB}\n",
                f"{V2}/memory.stat": STAT.format(300 * MIB),
            },
            4000,
            3300,
        ),
        (  # throttled from there on
            {
                "proc/self/cgroup": "0::/a\n",
                f"{V2}/a/memory.max": "max\n",
                f"{V2}/a/memory.high": f"{3000 * MIB}\n",
                f"{V2}/a/memory.current": f"{1000 * MIB}\n",
            },
            3000,
            2000,
        ),
        (  # others in the parent's group use most of its memory
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/a/b/memory.max": f"{4000 * MIB}\n",
                f"{V2}/a/b/memory.current": "0\n",
                f"{V2}/a/memory.max": f"{6000 * MIB}\n",
                f"{V2}/a/memory.current": f"{5500 * MIB}\n",
                f"{V2}/a/memory.stat": STAT.format(0),
            },
            4000,
            500,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/y\n",
                f"{V1}/x/memory.limit_in_bytes": f"{2000 * MIB}\n",
                f"{V1}/x/memory.usage_in_bytes": f"{900 * MIB}\n",
                f"{V1}/x/memory.stat": f"inactive_file 5\ntotal_inactive_file {100 * MIB}\n",
                "sys/fs/cgroup/cpu/y/memory.max": "1\n",
            },
            2000,
            1200,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1}/memory.usage_in_bytes": f"{900 * MIB}\n",
            },
            8000,
            5000,
        ),
        (  # over its limit: the next page is taken from another
            {
                "proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": f"{1000 * MIB}\n",
                f"{V2}/memory.current": f"{1001 * MIB}\n",
                f"{V2}/memory.stat": "damaged\n",
            },
            1000,
            0,
        ),
    ],
    ids=["no Linux", "no limit", "version 2", "high", "of the parent", "version 1",
         "no limit, version 1", "nothing left"],
)  # fmt: skip
def test_limits_of_either_version(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    total: int,
    available: int,
) -> None:
    machine = SimpleNamespace(total=8000 * MIB, available=5000 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    found = host_memory(write(tmp_path, files))
    assert found == HostMemory(total=total * MIB, available=available * MIB)


def test_this_machines_memory() -> None:
    found = host_memory()
    assert 0 < found.available <= found.total <= psutil.virtual_memory().total
