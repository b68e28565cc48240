"""Programmatic dependent launch: a kernel starts while the previous one is finishing.

Before waiting for that one, it can prefetch only data that no kernel writes (weights). Requires
NVIDIA sm_90 or later.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from llmc.kernels.triton.launch import interpreted


def supported() -> bool:
    """Whether this Triton and this GPU support it."""
    return not interpreted() and _supported()


def applies_to(device: torch.device) -> bool:
    """Whether kernels on this device can use it; an ahead-of-time build decides itself."""
    return device.type == "cuda" and supported()


@cache
def _supported() -> bool:
    cuda = getattr(getattr(tl, "extra", None), "cuda", None)
    if torch.version.hip or not hasattr(cuda, "gdc_wait") or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


@triton.jit
def wait_for_previous():
    """Wait until the previous kernel has ended and its results are visible, then let the next one
    start. Every program must call it: otherwise the next kernel, whose wait ends with this one,
    could overtake the previous one."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointer):
    """Prefetch the cache lines of these pointers into L2; nothing is read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
