"""Caches of another dtype than the model's: how keys and values are converted on writing and
reading.

An FP8 cache holds x / scale, saturated and rounded to nearest (ties to even); a read multiplies by
the scale. Scales are float32, [1] for the tensor or [Hkv], one per head; None is 1. A cache of 16
bits, which a float32 model can have, holds x, rounded to nearest.
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
}


def cache_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes that a cache of keys and values of dtype `dtype` can have, its own first."""
    if dtype == torch.float32:
        return (dtype, torch.float16, torch.bfloat16, *FP8)
    return (dtype, *FP8)


def narrower(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a cache: `wanted` if its elements are smaller than those of the keys' own."""
    return own if wanted is None or wanted.itemsize >= own.itemsize else wanted


def to_cache(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Convert x [..., Hkv, D] to the form in which a cache of dtype `dtype` stores it."""
    if dtype not in FP8:
        return x.to(dtype)
    y = x.float() if scale is None else x.float() / scale[:, None]
    largest = torch.finfo(dtype).max  # above it, a cast gives NaN, inf or this, by torch version
    return y.clamp(-largest, largest).to(dtype)


def from_cache(x: Tensor, scale: Tensor | None) -> Tensor:
    """Cached x [..., Hkv, D], dequantized to float32 if it is FP8, else as stored."""
    if x.dtype not in FP8:
        return x
    return x.float() if scale is None else x.float() * scale[:, None]


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
    with contiguous float32 scales of shape [1] or [Hkv]."""
    heads = key_cache.shape[1]
    return (
        key_cache.dtype == value_cache.dtype
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
