"""`write_kv`: write a step's keys and values to the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.cache_dtype import FP8, block_tokens, cache_dtypes, write_rows, zero_blocks
from llmc.kernels.registry import Case, op


@op(mutates=("key_cache", "value_cache"))
def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """key [T, Hkv, D], value [T, Hkv, Dv] -> caches [num_blocks, Hkv, block_size, D or Dv].

    slot_mapping [T] int64 is block * block_size + offset; a negative slot is skipped (padding).
    Slots of one call are distinct. Any strides are allowed if the last dimension is contiguous.
    Caches have one of the key's cache_dtypes, if float8 with k_scale and v_scale
    (`cache_dtype.py`).
    """
    block_size = block_tokens(key_cache)
    live = slot_mapping >= 0
    block, offset = slot_mapping[live] // block_size, slot_mapping[live] % block_size
    write_rows(key_cache, block, offset, key[live], k_scale, keys=True)
    write_rows(value_cache, block, offset, value[live], v_scale, keys=False)


@write_kv.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for tokens, heads, dim, v_dim, block_size in (
        (1, 1, 16, 16, 16),
        (7, 2, 64, 32, 16),
        (37, 3, 80, 80, 8),
    ):
        for cache in cache_dtypes(dtype):
            num_blocks = tokens // block_size + 3
            slots = torch.randperm(num_blocks * block_size, generator=gen)[:tokens]
            slots[::5] = -1
            scales = tuple(torch.rand(n, generator=gen) + 0.1 for n in (1, heads))
            yield (
                torch.randn(tokens, heads, dim, generator=gen).to(device, dtype),
                torch.randn(tokens, heads, v_dim, generator=gen).to(device, dtype),
                zero_blocks(num_blocks, heads, block_size, dim, cache).to(device),
                zero_blocks(num_blocks, heads, block_size, v_dim, cache).to(device),
                slots.to(device),
                *(s.to(device) if cache in FP8 else None for s in scales),
            )
