"""Ranks as threads of this process, in one gloo group."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from llmc.kernels.collectives import Group, ranks
from llmc.startup.tensor_parallel import open_group

T = TypeVar("T")
TIMEOUT_S = 60.0


def on_ranks(size: int, run: Callable[[Group], T], timeout_s: float = TIMEOUT_S) -> list[T]:
    """The results of `run(group)` on each rank; collectives inside it are among these ranks."""

    groups = []  # open until all are done

    def one(rank: int) -> T:
        group = open_group(folder, rank, size, torch.device("cpu"), timeout_s)
        groups.append(group)
        with ranks(group):
            return run(group)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
