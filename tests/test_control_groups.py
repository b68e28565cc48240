"""The limits of a container, in the files of version 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from control_group_files import write

from llmc import control_groups
from llmc.control_groups import available_cores, quota_cores, throttled_seconds


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        (  # the parent's is the narrower
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
    ids=["no Linux", "version 2", "no limit", "of the parent", "version 1", "no limit, version 1"],
)
def test_quotas_of_either_version(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    assert quota_cores(write(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("groups", "stats", "seconds"),
    [
        ("0::/\n", {}, 0.0),
        (  # the parent's quota is the one in force
            "0::/a/b\n",
            {"a/cpu.stat": "nr_throttled 3\nthrottled_usec 1500000\n", "a/b/cpu.stat": "nr 0\n"},
            1.5,
        ),
        ("4:cpu,cpuacct:/x\n", {"cpu/x/cpu.stat": "throttled_time 2500000000\n"}, 2.5),
        ("0::/\n", {"cpu.stat": "damaged\n"}, 0.0),
    ],
    ids=["no limit", "of the parent", "version 1", "damaged"],
)
def test_time_that_a_quota_took(
    tmp_path: Path, groups: str, stats: dict[str, str], seconds: float
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in stats.items()}
    assert throttled_seconds(write(tmp_path, {"proc/self/cgroup": groups, **files})) == seconds


@pytest.mark.parametrize(("quota", "cores"), [(None, 6), (0.5, 1), (2.5, 3), (64.0, 6)])
def test_cores_that_can_be_kept_busy(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    monkeypatch.setattr(control_groups, "quota_cores", lambda: quota)
    assert available_cores() == cores
