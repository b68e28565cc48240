"""The number of compute threads: the available cores, by affinity and by quota.

torch counts the cores that the process is allowed to run on. A container's CPU quota limits time,
not cores: with more threads than that, all are throttled together for a part of every period, and
each product waits for the last thread.
"""

from __future__ import annotations

import logging
import os

import torch

from llmc.control_groups import quota_cores

_log = logging.getLogger(__name__)


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
