"""Programmatic dependent launch: a kernel starts while the previous one is finishing.

Before waiting for that one, it can prefetch only data that no kernel writes (weights). Requires
NVIDIA sm_90 or later.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from llmc.kernels.triton.define import interpreted


def supported() -> bool:
    """Whether this Triton and this GPU support it."""
    return not interpreted() and _supported()


@cache
def _supported() -> bool:
    cuda = getattr(getattr(tl, "extra", None), "cuda", None)
    if torch.version.hip or not hasattr(cuda, "gdc_wait") or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


@triton.jit
def prefetch(pointer):
    """Prefetch the cache lines of these pointers into L2; nothing is read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
