"""Gumbel noise from Philox4x32-10, with the same random words as `kernels/sample.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four counter words and two key words, uint32 tensors of one shape -> four uint32 words."""
    for _ in tl.static_range(10):
        wide0 = c0.to(tl.uint64) * 0xD2511F53
        wide1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (wide1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (wide0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = wide1.to(tl.uint32)
        c3 = wide0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def gumbel(seed, position, first, BLOCK: tl.constexpr):
    """Noise for tokens [first, first + BLOCK), `first` a multiple of 4; seed, position int64."""
    group = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = group * 0
    low = (zero + (position & 0xFFFFFFFF)).to(tl.uint32)
    key0 = (zero + (seed & 0xFFFFFFFF)).to(tl.uint32)
    key1 = (zero + ((seed >> 32) & 0xFFFFFFFF)).to(tl.uint32)
    w0, w1, w2, w3 = philox(group, low, zero, zero, key0, key1)
    # token 4g + j has word j of group g
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    u = ((word >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(-tl.log(u))
