"""The paged cache tensors: their bytes, and how many blocks fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmc.kernels.cpu.pages import advise_huge_pages
from llmc.passes.page_attention import CacheSpec


def bytes_per_token(specs: Sequence[CacheSpec], dtype: torch.dtype) -> int:
    """Cache bytes that one token takes over all layers."""
    return sum(s.kv_heads * (s.head_dim + s.v_head_dim) for s in specs) * dtype.itemsize


def allocate(
    specs: Sequence[CacheSpec],
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """Per layer (key [num_blocks, Hkv, block_size, D], value [..., Dv]), by layer number.

    Not cleared: memory is taken as blocks are first written, and nothing unwritten is read.
    """

    def half(heads: int, dim: int) -> Tensor:
        shape = (num_blocks, heads, block_size, dim)
        return advise_huge_pages(torch.empty(shape, dtype=dtype, device=device))

    return [(half(s.kv_heads, s.head_dim), half(s.kv_heads, s.v_head_dim)) for s in specs]
