"""`rope_write_latent`: rotary embedding and the cache write of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.cache_dtype import FP8, block_tokens, cache_dtypes, write_rows, zero_blocks
from llmc.kernels.registry import Case, op
from llmc.kernels.rms_norm import normalize
from llmc.kernels.rope_write import rotate


@op(mutates=("key_cache",), shape="query")
def rope_write_latent(
    query: Tensor,
    latent: Tensor,
    shared: Tensor,
    latent_norm: Tensor | None,
    eps: float,
    norm_offset: float,
    cos_table: Tensor,
    sin_table: Tensor,
    positions: Tensor,
    interleaved: bool,
    key_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
) -> Tensor:
    """query [T, H, D + Dr], latent [T, R], shared [T, Dr] -> query, its last Dr channels rotated.

    The key of all heads, which is the latent (after its RMSNorm by latent_norm [R], if there is
    one) and the rotated shared part, is written to key_cache [num_blocks, 1, block_size, R + Dr] as
    in `write_kv`. cos_table, sin_table [max_position, Dr] float32; positions [T] int64 index them.
    Computed in float32 and rounded once.
    """
    cos, sin = cos_table[positions].float(), sin_table[positions].float()
    width = cos.shape[-1]
    rotated = rotate(query[..., -width:].float(), cos, sin, interleaved).to(query.dtype)
    normed = normalize(latent, latent_norm, eps, norm_offset) if latent_norm is not None else latent
    turned = rotate(shared.float()[:, None], cos, sin, interleaved)
    key = torch.cat((normed.float()[:, None], turned), dim=-1)
    live = slot_mapping >= 0
    block_size = block_tokens(key_cache)
    block, offset = slot_mapping[live] // block_size, slot_mapping[live] % block_size
    write_rows(key_cache, block, offset, key[live], k_scale, keys=True)
    return torch.cat((query[..., :-width], rotated), dim=-1)


@rope_write_latent.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    shapes = ((1, 2, 16, 8, 32), (7, 3, 24, 16, 80), (19, 5, 20, 20, 44))
    for tokens, heads, dim, width, rank in shapes:
        for interleaved, norm, cache in (
            (False, True, dtype),
            (True, False, dtype),
            *(
                (cache == FP8[1], cache != FP8[1], cache)
                for cache in cache_dtypes(dtype)[1:]
                if cache != torch.int8  # which no fast version of the attention reads either
            ),
        ):
            num_blocks, block_size = tokens // 16 + 2, 16
            angle = torch.rand(64, width // 2, generator=gen) * 6
            angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
            slots = torch.randperm(num_blocks * block_size, generator=gen)[:tokens]
            slots[3::4] = -1
            merged = torch.randn(tokens, rank + width + 3, generator=gen).to(device, dtype)
            latent, shared, _ = merged.split([rank, width, 3], dim=-1)
            scale = (torch.rand(1, generator=gen) + 0.1).to(device) if cache in FP8 else None
            yield (
                torch.randn(tokens, heads, dim, generator=gen).to(device, dtype),
                latent,
                shared,
                torch.randn(rank, generator=gen).to(device, dtype) if norm else None,
                1e-6,
                1.0 if cache == dtype else 0.0,
                angle.cos().to(device),
                angle.sin().to(device),
                torch.randint(0, 64, (tokens,), generator=gen).to(device),
                interleaved,
                zero_blocks(num_blocks, 1, block_size, rank + width, cache).to(device),
                slots.to(device),
                scale,
            )
