"""Caches in a narrower dtype than the inputs, in Triton: how kernels store and read them.

Caches of 8 bits are passed to kernels as uint8 (fp8.py says why). An int8 cache is passed a second
time as float32, as k_scale or v_scale: its blocks also contain the scales of their rows
(cache_dtype.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.cache_dtype import FP8, LEAST
from llmc.kernels.triton.fp8 import E4M3, E5M2, narrow
from llmc.kernels.triton.fp8 import widen as widen_float8

_FORMATS = {FP8[0]: E4M3.value, FP8[1]: E5M2.value, torch.int8: 3}
NONE, INT8 = tl.constexpr(0), tl.constexpr(3)  # other values of FORMAT are those of fp8.py
_LEAST = tl.constexpr(LEAST)


@triton.jit
def widen(codes, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Codes in uint8 -> the numbers that they stand for, without scales."""
    if FORMAT == INT8:
        wide = codes.to(tl.int8, bitcast=True)
    else:
        wide = widen_float8(codes, FORMAT, NATIVE)
    return wide


@triton.jit
def rotate(x, DIM: tl.constexpr):
    """x [N, D] in float32, zeros after the first DIM channels, as `rotate` in cache_dtype.py."""
    SIZE: tl.constexpr = DIM & -DIM
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    for i in tl.static_range(10):
        if (1 << i) < SIZE:
            pairs = tl.reshape(x, (ROWS, WIDTH // (2 << i), 2, 1 << i))
            a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            pairs = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
            x = tl.reshape(pairs, (ROWS, WIDTH))
    return x * SIZE**-0.5


@triton.jit
def to_int8(x):
    """x [N, D] in float32 -> codes in uint8 and scales [N, 1], as `to_int8` in cache_dtype.py."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)  # in the order of the magnitudes, NaN above all
    largest = tl.max(bits, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    usable = (largest > _LEAST) & (largest < float("inf"))
    y = tl.where(usable, x, 0.0) * tl.div_rn(127.0, tl.where(usable, largest, 1.0))
    rounded = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23 leaves no fraction bits
    codes = rounded.to(tl.int32).to(tl.uint8)
    return codes, tl.div_rn(tl.where(largest <= _LEAST, 0.0, largest), 127.0)


@triton.jit
def slot_scale(scale, block, inside, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr,
               FORMAT: tl.constexpr):  # fmt: skip
    """The pointer to the first head's scale of a slot of an int8 cache, else `scale` itself."""
    if FORMAT == INT8:
        place = scale + BLOCK_SIZE * stride_slot // 4 + block * (stride_block // 4) + inside
    else:
        place = scale
    return place


@triton.jit
def store_heads(pointers, x, scale, head, heads, stride_head, mask, DIM: tl.constexpr,
                SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Store x [HEADS, D] of the heads `head` [HEADS, 1] at `pointers` in the form of the cache.

    `scale`: what `slot_scale` gives. stride_head: of the cache's heads. mask [HEADS, D]: of DIM
    channels. KEYS: keys, not values.
    """
    if FORMAT == NONE:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)
    elif FORMAT == INT8:
        y = tl.where(mask, x.to(tl.float32), 0.0)
        if KEYS:
            y = rotate(y, DIM)
        codes, scales = to_int8(y)
        tl.store(pointers, codes, mask=mask)
        tl.store(scale + head * stride_head // 4, scales, mask=head < heads)
    else:
        scales = scales_of(scale, head, heads, SCALE_STRIDE)
        tl.store(pointers, narrow(tl.div_rn(x.to(tl.float32), scales), FORMAT), mask=mask)


@triton.jit
def scales_of(scale, head, heads, STRIDE: tl.constexpr):
    """The scale of each head, 1 if there are no scales. STRIDE: 0 if all heads share one scale."""
    if scale is None:
        found = head * 0.0 + 1.0
    else:
        found = tl.load(scale + head * STRIDE, mask=head < heads, other=1.0)
    return found


def as_bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8) if cache.dtype in _FORMATS else cache


def scales_for(cache: Tensor, scale: Tensor | None) -> Tensor | None:
    """What kernels get as k_scale or v_scale: the cache's own scales if it is int8."""
    return cache.view(torch.float32) if cache.dtype == torch.int8 else scale


def format_constants(
    cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> dict[str, Any]:
    return {
        "FORMAT": _FORMATS.get(cache.dtype, 0),
        "K_SCALE_STRIDE": int(k_scale is not None and k_scale.shape[0] > 1),
        "V_SCALE_STRIDE": int(v_scale is not None and v_scale.shape[0] > 1),
    }
