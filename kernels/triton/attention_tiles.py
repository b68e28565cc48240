"""Tensor descriptors of the caches, through which a GPU's copy engine loads whole tiles of keys.

A cache [num_blocks, Hkv, block_size, D] is described as rows [rows, D] at its slot stride, so that
BLOCK_N slots of one block and head are consecutive rows. Requires NVIDIA sm_90 or later.

A tile is one box of one block: blocks of at least BLOCK_N slots are needed (64 for heads of up to
128 channels), as one copy can't gather rows of several blocks before sm_100. The default stays 16,
since by default nothing is loaded through descriptors: they are off until measured, and the keys of
this step, which `rope_attention` writes in the same kernel, are not visible to the copy engine
without a fence of its own. Larger blocks cost cache: a request leaves half a block unused on
average, and half a block of a cached prefix is computed again (32 tokens each instead of 8).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.launch import power_of_2

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton
    TensorDescriptor = None

_MAX_BOX = 256  # elements in a dimension of a tile
# Triton 3.7 and 3.8 ask for numbers of registers that no warp can have: their own check of the code
# fails. 3.9 compiles it, but spills 80 bytes a thread where 3.6 spills 8.
TRITON_SPECIALIZES = [int(part) for part in triton.__version__.split(".")[:2]] < [3, 7]


def fits_descriptors(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_n: int) -> bool:
    """Whether tiles of `block_n` keys and values can be loaded without conversion."""
    on_gpu = query.device.type == "cuda"
    return (
        TensorDescriptor is not None
        and (dependent_launch.supported() or not on_gpu)  # the same GPUs have both
        and all(_is_rows(cache, query, block_n) for cache in (key_cache, value_cache))
    )


def _is_rows(cache: Tensor, query: Tensor, block_n: int) -> bool:
    block, head, slot, _ = cache.stride()
    return (
        cache.dtype == query.dtype
        and cache.shape[2] % block_n == 0
        and power_of_2(cache.shape[3]) <= _MAX_BOX
        and block % slot == head % slot == 0
        and slot * cache.element_size() % 16 == 0
        and cache.data_ptr() % 16 == 0
    )


def specializes(device: torch.device) -> bool:
    """Whether Triton can give a loop's copies, products and softmax to separate warps for this GPU.

    Only Triton 3.6, and for Blackwell's (sm_100 and 103). For Hopper, it leaves kernels with more
    than four warps or an `else` as they are and fails to compile the others; later Blackwells
    (sm_120) have no tensor memory, over which the warps pass their results.
    """
    return TRITON_SPECIALIZES and (device.type != "cuda" or _is_blackwell(device.index))


@lru_cache
def _is_blackwell(index: int | None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index)[0] == 10


def tiles(key_cache: Tensor, value_cache: Tensor, block_n: int) -> dict[str, Any]:
    """The kernel's arguments for both caches; strides count rows."""
    found: dict[str, Any] = {}
    for name, short, cache in (("key_cache", "kc", key_cache), ("value_cache", "vc", value_cache)):
        block, head = (stride // cache.stride(2) for stride in cache.stride()[:2])
        blocks, heads, size, dim = cache.shape
        rows = (blocks - 1) * block + (heads - 1) * head + size
        found[name] = TensorDescriptor(
            cache, [rows, dim], [cache.stride(2), 1], [block_n, power_of_2(dim, 16)]
        )
        found |= {f"{short}_block": block, f"{short}_head": head, f"{short}_slot": 1}
    return found
