"""The paged cache tensors and the state slots: sizes, allocation and copies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llmc.kernels.cpu.pages import advise_huge_pages
from llmc.passes.page_attention import CacheSpec
from llmc.passes.slot_state import StateSpec


def bytes_per_token(specs: Sequence[CacheSpec]) -> int:
    """Cache bytes per token in all layers of one group."""
    return sum(spec.bytes_per_token for spec in specs)


def allocate(
    specs: Sequence[CacheSpec],
    *,
    num_blocks: int,
    block_size: int,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """Allocate (key [num_blocks, Hkv, rows, D], value [num_blocks, Hkv, rows, Dv]) for each cache,
    in order; there are block_size rows, or those of the spec.

    Not zeroed: memory is committed when blocks are first written, and nothing unwritten is read.
    """

    def half(spec: CacheSpec, rows: int, dim: int) -> Tensor:
        shape = (num_blocks, spec.kv_heads, block_size * rows // spec.tokens, dim)
        return advise_huge_pages(torch.empty(shape, dtype=spec.dtype, device=device))

    return [(half(s, s.rows, s.head_dim), half(s, s.v_rows, s.v_head_dim)) for s in specs]


def copy_blocks(caches: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """Copy blocks (or slots) `source` [N] int32 to `target` [N], in every cache tensor.

    No block must be in both.
    """
    if source.device.type == "cpu":  # where indexed copies are done value by value
        pairs = list(zip(source.tolist(), target.tolist(), strict=True))
        for cache in caches:
            for one, other in pairs:
                cache[other].copy_(cache[one])
        return
    for cache in caches:
        data = cache.view(torch.uint8)  # raw bytes, since float8 has no index ops
        data.index_copy_(0, target.long(), data.index_select(0, source))


def state_bytes(specs: Sequence[StateSpec]) -> int:
    """Bytes of recurrent state per request, regardless of its length."""
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in specs)


def allocate_states(
    specs: Sequence[StateSpec], *, num_rows: int, num_snapshots: int, device: torch.device
) -> list[Tensor]:
    """Allocate a slot for each row, one for padding, then the snapshots.

    On CPU, memory is committed when a slot is first written. A request's first step clears its own
    slot, unless it starts from a snapshot.
    """
    slots = num_rows + 1 + num_snapshots
    return [torch.zeros((slots, *spec.shape), dtype=spec.dtype, device=device) for spec in specs]
