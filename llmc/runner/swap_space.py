"""Host memory for the blocks of preempted requests, and the copies in both directions.

One slot holds a block of all layers contiguously, so that a block moves in one copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_TRIAL_BLOCKS = 32
_MOST_BYTES = 1 << 30  # of a piece


def piece_sizes(num_slots: int, block_bytes: int) -> Iterator[int]:
    """The numbers of slots to allocate at a time. torch rounds pinned memory up to a power of two,
    so pieces are at most as large as one: 20 GiB in one piece would take 32."""
    while num_slots:
        left = num_slots * block_bytes
        size = min(_MOST_BYTES, 1 << (left.bit_length() - 1))
        count = max(1, size // block_bytes)
        yield count
        num_slots -= count


class SwapSpace:
    """`num_slots` slots for the blocks of `caches` ([num_blocks, ...] each)."""

    def __init__(self, caches: Sequence[Tensor], num_slots: int) -> None:
        # raw bytes, since float8 has no index ops
        self._caches = [cache.view(torch.uint8).flatten(1) for cache in caches]
        self._widths = [cache.shape[1] for cache in self._caches]
        self.block_bytes = sum(self._widths)
        self.device = caches[0].device
        self.num_slots = num_slots
        pinned = self.device.type == "cuda"
        self._slots: list[Tensor] = []  # views of pieces
        for count in piece_sizes(num_slots, self.block_bytes):
            shape = count, self.block_bytes
            self._slots += torch.empty(shape, dtype=torch.uint8, pin_memory=pinned).unbind()

    def swap_out(self, blocks: Tensor, slots: Sequence[int]) -> None:
        """Copy blocks [N] int32 (on the device) to these slots. Asynchronous."""
        gathered = torch.cat([cache.index_select(0, blocks) for cache in self._caches], 1)
        for i, slot in enumerate(slots):
            self._slots[slot].copy_(gathered[i], non_blocking=True)

    def swap_in(self, slots: Sequence[int], blocks: Tensor) -> None:
        """Copy these slots to blocks [N] int32. Queued after earlier copies."""
        arrived = torch.empty(len(slots), self.block_bytes, dtype=torch.uint8, device=self.device)
        for i, slot in enumerate(slots):
            arrived[i].copy_(self._slots[slot], non_blocking=True)
        index = blocks.long()
        for cache, part in zip(self._caches, arrived.split(self._widths, 1), strict=True):
            cache.index_copy_(0, index, part)

    def measure(self) -> float:
        """Bytes per second, one way. Must be called before the caches have contents."""
        count = min(_TRIAL_BLOCKS, len(self._slots), self._caches[0].shape[0])
        blocks = torch.arange(count, dtype=torch.int32, device=self.device)
        slots = range(count)
        self._round_trip(blocks, slots)  # warm up: commit memory and load kernels
        start = time.perf_counter()
        self._round_trip(blocks, slots)
        return 2 * count * self.block_bytes / (time.perf_counter() - start)

    def _round_trip(self, blocks: Tensor, slots: Sequence[int]) -> None:
        self.swap_out(blocks, slots)
        self.swap_in(slots, blocks)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
