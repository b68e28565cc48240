"""`write_segments`: write a step's delta to the rows' memory, all runs of words in one launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op

HEADER_WORDS = 4  # number of runs, index of the first, and padding to 16 bytes
SEGMENT_WORDS = 3  # target, length, source


@op(mutates=("memory",))
def write_segments(memory: Tensor, delta: Tensor) -> None:
    """Copy runs of words from `delta` [W] int32 to `memory` [M] int32.

    delta[0] is the number of runs and delta[1] the index of the first, so that neither comes from
    the host and a captured launch can be replayed for another delta. Each is three words: target,
    length, source; memory[target : target + length] = delta[source : source + length]. Targets do
    not overlap.
    """
    count, first = delta[:2].tolist()
    runs = delta[first : first + count * SEGMENT_WORDS].view(-1, SEGMENT_WORDS)
    for target, length, source in runs.tolist():
        memory[target : target + length] = delta[source : source + length]


@write_segments.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for lengths in ((), (1,), (5, 0, 1), (3, 1500, 2, 64), tuple(range(300))):
        first, count = HEADER_WORDS + 8, len(lengths)
        source = target = 0
        runs = []
        for i, length in enumerate(lengths):
            runs += [target + 2 * i, length, first + count * SEGMENT_WORDS + source]
            source, target = source + length, target + length + 2
        words = torch.arange(source + 3, dtype=torch.int32) * 7 - 5
        start = [count, first, *[-1] * (first - 2), *runs]
        delta = torch.cat([torch.tensor(start, dtype=torch.int32), words])
        memory = torch.full((target + 2 * count + 4,), -9, dtype=torch.int32)
        yield memory.to(device), delta.to(device)
