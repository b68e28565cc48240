"""Counters with which the last program of a reduction recognizes itself.

A program stores its part, then asks `is_last`. The one that is last combines all parts in a fixed
order and sets the counter back to zero, so neither the next launch nor the next replay of a graph
has to.

Kernels on one stream run one after another, so they share the counters of the stream. A kernel
with dependent launch touches them only after its wait.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_hip

_MIN_COUNT = 4096
_made: dict[tuple[torch.device, int], list[Tensor]] = {}  # all are kept: graphs hold addresses


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` zeros (int32) that belong to the current stream of `device`."""
    if device.type == "meta":
        return torch.empty(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    made = _made.setdefault((device, stream), [])
    if not made or made[-1].numel() < count:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # the graph's memory pool would own the counters; the warm-up before it makes them
            raise RuntimeError("counters must be allocated before a graph is captured")
        size = made[-1].numel() if made else _MIN_COUNT
        while size < count:
            size *= 2
        made.append(torch.zeros(size, dtype=torch.int32, device=device))
    return made[-1]


@triton.jit
def barrier():
    """Wait until all threads of the program are here and have stored what they stored before.

    AMD's barrier alone does not wait for stores: each wave waits for its own first. `orders_stores`
    says where the other threads then also read them.
    """
    if is_hip():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)", "=v,v", [tl.arange(0, 64)], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


def orders_stores(device: torch.device) -> bool:
    """Whether after `barrier` a thread reads what the others of its program have stored.

    On AMD, on CDNA (gfx9), where the waves of a program share one L1 (LLVM's memory model for
    gfx942: nothing is invalidated within a workgroup, unless it is split over compute units, which
    Triton does not ask for). RDNA has an L0 for each half of a program, and counts stores apart.
    """
    return device.type != "cuda" or torch.version.hip is None or _is_cdna(device.index)


@lru_cache
def _is_cdna(index: int | None) -> bool:
    return str(torch.cuda.get_device_properties(index or 0).gcnArchName).startswith("gfx9")


@triton.jit
def is_last(counter, parts):
    """Whether this program is the last of `parts` to get here. It may read what all have stored.

    The barrier orders the stores of a program's threads before the addition, which one thread
    makes. The addition releases them to the whole GPU, and acquires those of the programs that
    added before. The last one must read with `cache_modifier=".cg"`, since L1 is not coherent.
    """
    barrier()
    done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if done == parts - 1:
        tl.store(counter, 0)
    return done == parts - 1


@triton.jit
def sum_of_parts(part, stride, mask, PARTS: tl.constexpr):
    """The sum over PARTS parts in order, read by the last program."""
    total = tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, PARTS):
        total += tl.load(part + i * stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total
