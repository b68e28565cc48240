"""A Ray cluster on this machine for tests, if Ray is installed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ray = pytest.importorskip(
    "ray", reason="Ray is not installed here; tests/e2e/test_on_ray.py runs these elsewhere"
)
from ray.cluster_utils import Cluster  # noqa: E402

MARKS = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore"),  # warnings from Ray
]
TINY: dict[str, Any] = {"opt_level": 0, "device": "cpu", "max_num_seqs": 8}


@contextlib.contextmanager
def live_ray(folder: Path, *, num_nodes: int = 1, cores: int = 4) -> Iterator[None]:
    """Start nodes with `cores` nominal cores each; workers have `folder` on their import path."""
    here = os.getcwd()
    os.chdir(folder)
    node: dict[str, Any] = {"num_cpus": cores, "object_store_memory": 100 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(1, num_nodes):
            nodes.add_node(**node)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()
        os.chdir(here)


def wait_for(is_so: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)


def processes(title: str) -> dict[int, psutil.Process]:
    """Workers with this title, by pid, of the Ray that this process started."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if title in " ".join(process.cmdline()):
                found[process.pid] = process
    return found


def placement_groups() -> list[str]:
    """The states of placement groups that are not removed."""
    states = [group["state"] for group in ray.util.placement_group_table().values()]
    return [state for state in states if state != "REMOVED"]
