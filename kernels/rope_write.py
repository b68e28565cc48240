"""`rope_write`: query/key normalization, rotary embedding and the cache write as one op.

Rotary embedding: Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.cache_dtype import FP8, cache_dtypes, zero_blocks
from llmc.kernels.registry import Case, op
from llmc.kernels.rms_norm import normalize
from llmc.kernels.write_kv import write_kv


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first Dr channels of x [T, H, D] by cos, sin [T, Dr]; the rest pass through.

    Channel i pairs with i + Dr / 2, or with its neighbor (2i, 2i + 1) if interleaved.
    """
    width = cos.shape[-1]
    rot, rest = x[..., :width], x[..., width:]
    if interleaved:
        turned = torch.stack((-rot[..., 1::2], rot[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-rot[..., width // 2 :], rot[..., : width // 2]), dim=-1)
    return torch.cat((rot * cos[:, None] + turned * sin[:, None], rest), dim=-1)


@op(mutates=("key_cache", "value_cache"), shape="query")
def rope_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    norm_offset: float,
    cos_table: Tensor,
    sin_table: Tensor,
    positions: Tensor,
    interleaved: bool,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    norm_last: bool = False,
) -> Tensor:
    """query [T, H, D], key [T, Hkv, D], value [T, Hkv, Dv] -> rotated query [T, H, D], contiguous.

    query_norm, key_norm: RMSNorm weights, or None: [D] of each head, or, of more than one, [H D] or
    [Hkv D] of all heads together; norm_last: heads are normalized after the rotation, not before
    it, and not together. cos_table, sin_table
    [max_position, Dr] float32 with Dr <= D; positions [T] int64 index them. The rotated key and
    the value are written to the caches as in `write_kv`. Computed in float32 and rounded once.
    """
    cos, sin = cos_table[positions], sin_table[positions]

    def turn(x: Tensor, weight: Tensor | None) -> Tensor:
        y = x.float()
        if weight is not None and not norm_last:
            together = y.flatten(1) if weight.shape[0] > y.shape[-1] else y
            y = normalize(together, weight, eps, norm_offset).view(y.shape)
        y = rotate(y, cos.float(), sin.float(), interleaved)
        if weight is not None and norm_last:
            y = normalize(y, weight, eps, norm_offset)
        return y

    write_kv.reference(
        turn(key, key_norm), value, key_cache, value_cache, slot_mapping, k_scale, v_scale
    )
    return turn(query, query_norm).to(query.dtype).contiguous()


@rope_write.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    shapes = ((1, 2, 1, 16, 16, 16), (7, 4, 2, 64, 64, 32), (19, 6, 3, 80, 48, 80))
    for tokens, heads, kv_heads, dim, v_dim, width in shapes:
        of_caches = (
            (cache == FP8[1], cache != FP8[1], 0.0, False, cache)
            for cache in cache_dtypes(dtype)[1:]
        )
        for interleaved, norm, offset, norm_last, cache in (
            (False, True, 0.0, False, dtype),
            (False, "together", 0.5, False, dtype),
            (True, "together", 0.0, False, torch.int8),
            (True, False, 0.0, False, dtype),
            (False, True, 1.0, False, dtype),
            (False, True, 0.5, True, dtype),
            (True, True, 0.0, True, dtype),
            *of_caches,
        ):
            num_blocks, block_size = tokens // 16 + 2, 16
            angle = torch.rand(64, width // 2, generator=gen) * 6
            angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
            slots = torch.randperm(num_blocks * block_size, generator=gen)[:tokens]
            slots[3::4] = -1
            scales = tuple(torch.rand(n, generator=gen) + 0.1 for n in (kv_heads, 1))
            widths = (heads * dim, kv_heads * dim) if norm == "together" else (dim, dim)
            weights = [torch.randn(width, generator=gen).to(device, dtype) for width in widths]
            packed = torch.randn(tokens, (heads + kv_heads) * dim + kv_heads * v_dim, generator=gen)
            q, k, v = packed.to(device, dtype).split(
                [heads * dim, kv_heads * dim, kv_heads * v_dim], dim=-1
            )
            yield (
                q.unflatten(-1, (heads, dim)),
                k.unflatten(-1, (kv_heads, dim)),
                v.unflatten(-1, (kv_heads, v_dim)),
                *(weights if norm else (None, None)),
                1e-6,
                offset,
                angle.cos().to(device),
                angle.sin().to(device),
                torch.randint(0, 64, (tokens,), generator=gen).to(device),
                interleaved,
                zero_blocks(num_blocks, kv_heads, block_size, dim, cache).to(device),
                zero_blocks(num_blocks, kv_heads, block_size, v_dim, cache).to(device),
                slots.to(device),
                *(s.to(device) if cache in FP8 else None for s in scales),
                norm_last,
            )
