"""Float8 in Triton: codes are moved as bytes and converted in hardware or by bit operations.

Targets without float8 (sm_80) have no pointers to it. Codes are read as float16, which represents
every code exactly. If the GPU supports the conversion (NATIVE), it is used; otherwise codes are
shifted, since a code has the bits of a float16 with a different exponent bias.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

E4M3, E5M2 = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def widen(codes, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 -> float16, exactly."""
    if FORMAT == E5M2:
        wide = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif NATIVE:
        wide = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = codes.to(tl.uint16)
        magnitude = bits & 0x7F
        moved = ((bits & 0x80) << 8) | (magnitude << 7)
        # exponents of e4m3 have a bias of 7, those of float16 of 15
        wide = moved.to(tl.float16, bitcast=True) * 256.0
        wide = tl.where(magnitude == 0x7F, float("nan"), wide).to(tl.float16)
    return wide


@triton.jit
def narrow(x, FORMAT: tl.constexpr):
    """float32 -> codes in uint8: saturated, rounded to nearest with ties to even."""
    MANTISSA: tl.constexpr = 3 if FORMAT == E4M3 else 2
    BIAS: tl.constexpr = 7 if FORMAT == E4M3 else 15
    LARGEST: tl.constexpr = 448.0 if FORMAT == E4M3 else 57344.0
    DROP: tl.constexpr = 23 - MANTISSA
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.abs(x)
    a = tl.where(size > LARGEST, LARGEST, size)
    bits = a.to(tl.uint32, bitcast=True)
    normal = ((bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP) - (
        (127 - BIAS) << MANTISSA
    )
    # for subnormals the step is constant: adding 2^23 steps leaves the step count in the low bits
    SHIFTER: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23
    shifter = tl.full(x.shape, SHIFTER, tl.uint32).to(tl.float32, bitcast=True)
    small = (a + shifter).to(tl.uint32, bitcast=True) - SHIFTER
    code = tl.where(bits >= ((128 - BIAS) << 23), normal, small)
    code = tl.where(x != x, 0x7F, code)
    return (code | sign).to(tl.uint8)


@lru_cache
def _cuda_converts(index: int | None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 9)


def converts(device: torch.device) -> bool:
    """Whether the GPU converts e4m3 to float16 in hardware."""
    return device.type == "cuda" and _cuda_converts(device.index)
