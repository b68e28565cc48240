"""Caches of another dtype than the model's: how keys and values are converted on writing and
reading.

An FP8 cache holds x / scale, saturated and rounded to nearest (ties to even); a read multiplies by
the scale. Scales are float32, [1] for the tensor or [Hkv], one per head; None is 1. A cache of 16
bits, which a float32 model can have, holds x, rounded to nearest.

An int8 cache needs no scales from outside: each token and head has its own, the largest magnitude /
127. They are stored in the block itself, as float32 in further rows behind those of its tokens:

    [num_blocks, Hkv, block_size + ceil(4 * block_size / D), D]

Some channels of keys are much larger than the others, which would leave few of the 8 bits to those.
So what is rounded is a key times a Hadamard matrix, which spreads them over all channels (QuaRot,
https://arxiv.org/abs/2404.00456).
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CACHE_DTYPES = {  # values of the option
    "auto": None,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": FP8[0],
    "fp8_e5m2": FP8[1],
    "int8": torch.int8,
}
LEAST = 1e-30  # rows without a larger value are stored as zeros: 127 / theirs could be infinite


def cache_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes that a cache of keys and values of dtype `dtype` can have, its own first."""
    if dtype == torch.float32:
        return (dtype, torch.float16, torch.bfloat16, *FP8, torch.int8)
    return (dtype, *FP8, torch.int8)


def narrower(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a cache: `wanted` if its elements are smaller than those of the keys' own."""
    return own if wanted is None or wanted.itemsize >= own.itemsize else wanted


def cache_rows(block_size: int, dim: int, dtype: torch.dtype) -> int:
    """Rows [D] of a block for `block_size` tokens: the tokens', and those for scales."""
    if dtype != torch.int8 or dim == 0:
        return block_size
    return block_size + -(-4 * block_size // dim)


def zero_blocks(
    num_blocks: int, heads: int, block_size: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """A cache of zeros for keys or values of `dim` channels, in dtype."""
    shape = (num_blocks, heads, cache_rows(block_size, dim, dtype), dim)
    return torch.zeros(shape, dtype=dtype)


def block_tokens(cache: Tensor) -> int:
    """Tokens per block of a cache [num_blocks, Hkv, rows, D]: the inverse of `cache_rows`."""
    rows, dim = cache.shape[2:]
    return rows * dim // (dim + 4) if cache.dtype == torch.int8 and dim else rows


def row_scales(cache: Tensor) -> Tensor:
    """A view of the scales [num_blocks, Hkv, block_size] of an int8 cache. 4 divides D."""
    tokens, dim = block_tokens(cache), cache.shape[3]
    flat = cache.view(*cache.shape[:2], cache.shape[2] * dim)
    return flat[..., tokens * dim : (dim + 4) * tokens].view(torch.float32)


def rotate(x: Tensor) -> Tensor:
    """x [..., D] in float32 times the Hadamard matrix whose size is the largest power of 2 that
    divides D, repeated for each such part of the channels. It is orthonormal and its own inverse.
    """
    size = x.shape[-1] & -x.shape[-1]
    y, step = x.float(), 1
    while step < size:
        a, b = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    return y * float(size**-0.5)


def write_rows(
    cache: Tensor, block: Tensor, offset: Tensor, x: Tensor, scale: Tensor | None, *, keys: bool
) -> None:
    """Store x [N, Hkv, D], `keys` or values, at slots `offset` [N] of the blocks `block` [N]."""
    if cache.dtype == torch.int8:
        codes, scales = to_int8(rotate(x) if keys else x)
        cache[block, :, offset], row_scales(cache)[block, :, offset] = codes, scales
    else:
        indexable(cache)[block, :, offset] = indexable(to_cache(x, cache.dtype, scale))


def read_blocks(cache: Tensor, blocks: Tensor, scale: Tensor | None, *, keys: bool) -> Tensor:
    """The rows [N, block_size, Hkv, D] of the blocks `blocks` [N] int64, `keys` or values,
    dequantized to float32 if they have 8 bits, else as stored."""
    rows = indexable(cache)[blocks].view(cache.dtype)[:, :, : block_tokens(cache)].transpose(1, 2)
    if cache.dtype == torch.int8:
        y = rows.float() * row_scales(cache)[blocks].transpose(1, 2)[..., None]
        return rotate(y) if keys else y
    if cache.dtype not in FP8:
        return rows
    return rows.float() if scale is None else rows.float() * scale[:, None]


def to_cache(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Convert x [..., Hkv, D] to what a cache of dtype `dtype` stores, which is not int8."""
    if dtype not in FP8:
        return x.to(dtype)
    y = x.float() if scale is None else x.float() / scale[:, None]
    largest = torch.finfo(dtype).max  # above it, a cast gives NaN, inf or this, by torch version
    return y.clamp(-largest, largest).to(dtype)


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., D] of x, rounded to nearest (ties to even), and their scales [...] in float32.

    A row with NaN or an infinity is read as NaN.
    """
    y = x.float()
    largest = y.abs().amax(-1)
    usable = (largest > LEAST) & (largest < torch.inf)
    inverse = torch.where(usable, 127 / largest, 0.0)
    codes = torch.where(usable[..., None], y * inverse[..., None], 0.0).round().to(torch.int8)
    return codes, torch.where(largest <= LEAST, 0.0, largest) / 127


def to_int8_blocks(x: Tensor, *, keys: bool) -> Tensor:
    """An int8 cache of x [num_blocks, Hkv, block_size, D], `keys` or values."""
    num_blocks, heads, block_size, dim = x.shape
    cache = zero_blocks(num_blocks, heads, block_size, dim, torch.int8).to(x.device)
    codes, scales = to_int8(rotate(x) if keys else x)
    cache[:, :, :block_size], row_scales(cache)[:] = codes, scales
    return cache


def indexable(cache: Tensor) -> Tensor:
    """The same memory in a dtype that torch can gather and scatter."""
    return cache.view(torch.uint8) if cache.dtype in FP8 else cache


def caches_fit(
    x: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> bool:
    """Whether fast versions support these caches for x: they have one of its cache_dtypes, if FP8
    with contiguous float32 scales of shape [1] or [Hkv], if int8 with dense blocks."""
    heads = key_cache.shape[1]
    return (
        key_cache.dtype == value_cache.dtype
        and (key_cache.dtype != torch.int8 or all(map(_is_dense, (key_cache, value_cache))))
        and all(
            c.device == x.device and c.dtype in cache_dtypes(x.dtype) and c.stride(-1) == 1
            for c in (key_cache, value_cache)
        )
        and all(
            s.dtype == torch.float32
            and s.is_contiguous()
            and s.shape in ((1,), (heads,))
            and key_cache.dtype in FP8
            for s in (k_scale, v_scale)
            if s is not None
        )
    )


def _is_dense(cache: Tensor) -> bool:
    dim = cache.shape[3]
    return dim > 0 and dim % 4 == 0 and cache.stride(2) == dim
