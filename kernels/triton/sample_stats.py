"""First half of the sampler: the highest logit of every chunk of every row, over the whole GPU.

Reads all logits once. The second half (sample_draw.py) then reads only the chunks that matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmc.kernels.triton.dependent_launch import wait_for_previous


@triton.jit
def store_stats(x, chunk_max, chunk_arg, row, chunk, vocab, chunks, BLOCK: tl.constexpr):
    """chunk_max: +inf also for a NaN (the row is invalid); chunk_arg: the lowest token with it."""
    v = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.where(v < vocab, tl.where(x == x, x, float("inf")), float("-inf"))
    highest = tl.max(x, axis=0)
    token = tl.min(tl.where((x == highest) & (v < vocab), v, vocab), axis=0)
    tl.store(chunk_max + row * chunks + chunk, highest)
    tl.store(chunk_arg + row * chunks + chunk, token)


@triton.jit
def stats_kernel(logits, chunk_max, chunk_arg, logits_row, vocab, chunks, BLOCK: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    if PDL:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    v = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * logits_row + v, mask=v < vocab, other=0.0).to(tl.float32)
    store_stats(x, chunk_max, chunk_arg, row, chunk, vocab, chunks, BLOCK)
