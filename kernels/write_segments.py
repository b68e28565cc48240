"""`write_segments`: write a step's delta to the rows' memory, all runs of words in one launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op

SEGMENT_WORDS = 3  # target, length, source


@op(mutates=("memory",))
def write_segments(memory: Tensor, delta: Tensor, count: int) -> None:
    """Copy `count` runs of words from `delta` [W] int32 to `memory` [M] int32.

    Words 3i to 3i + 2 of delta are run i: target, length, source, and
    memory[target : target + length] = delta[source : source + length]. Targets do not overlap.
    """
    for target, length, source in delta[: count * SEGMENT_WORDS].view(-1, SEGMENT_WORDS).tolist():
        memory[target : target + length] = delta[source : source + length]


@write_segments.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for lengths in ((1,), (5, 0, 1), (3, 1500, 2, 64)):
        count = len(lengths)
        source = target = 0
        header = []
        for i, length in enumerate(lengths):
            header += [target + 2 * i, length, count * SEGMENT_WORDS + source]
            source, target = source + length, target + length + 2
        words = torch.arange(source + 3, dtype=torch.int32) * 7 - 5
        delta = torch.cat([torch.tensor(header, dtype=torch.int32), words])
        memory = torch.full((target + 2 * count + 4,), -9, dtype=torch.int32)
        yield (memory.to(device), delta.to(device), count)
