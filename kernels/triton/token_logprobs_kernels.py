"""The two kernels of `token_logprobs`: statistics of every chunk of logits, then a row's results.

The most likely tokens are selected one by one: the chunk of the best remaining token is read again
to find the next one. A chunk without remaining tokens has a token of `vocab` or more.
"""

from __future__ import annotations

import triton
import triton.language as tl

MINUS_INF = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["vocab", "chunks"])
def chunk_kernel(
    logits, tokens, chunk_max, chunk_arg, chunk_sum, chunk_above, logits_row, vocab, chunks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """For each chunk: its highest logit (+inf for a NaN), the lowest token with it, the sum of
    exp(x - highest), and the number of logits above that of the row's token."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    v = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocab
    x = tl.load(logits + row * logits_row + v, mask=inside, other=MINUS_INF).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    highest = tl.max(x, axis=0)
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < vocab)
    mine = tl.load(logits + row * logits_row + token, mask=known, other=0.0).to(tl.float32)
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    at = row * chunks + chunk
    tl.store(chunk_max + at, highest)
    tl.store(chunk_arg + at, tl.min(tl.where((x == highest) & inside, v, vocab), axis=0))
    tl.store(chunk_sum + at, tl.sum(tl.exp2((x - base) * LOG2E), axis=0))
    tl.store(chunk_above + at, tl.sum(((x > mine) & inside).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["vocab", "chunks", "k"])
def report_kernel(
    logits, tokens, chunk_max, chunk_arg, chunk_sum, chunk_above,
    chosen, ranks, top_ids, top_values, logits_row, vocab, chunks, k,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    live = c < chunks
    left_max = tl.load(chunk_max + row * chunks + c, mask=live, other=MINUS_INF)
    left_arg = tl.load(chunk_arg + row * chunks + c, mask=live, other=2147483647)
    sums = tl.load(chunk_sum + row * chunks + c, mask=live, other=0.0)
    above = tl.sum(tl.load(chunk_above + row * chunks + c, mask=live, other=0), axis=0)
    highest = tl.max(left_max, axis=0)
    bad = (highest == float("inf")) | (highest == MINUS_INF)
    base = tl.where(bad, 0.0, highest)
    scaled = tl.where(left_max == MINUS_INF, 0.0, sums * tl.exp2((left_max - base) * LOG2E))
    total = base + tl.log(tl.where(bad, 1.0, tl.sum(scaled, axis=0)))
    nan = float("nan")

    row_logits = logits + row * logits_row
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < vocab)
    mine = tl.load(row_logits + token, mask=known, other=0.0).to(tl.float32)
    good = known & (bad == 0)
    tl.store(chosen + row, tl.where(good, mine - total, nan))
    tl.store(ranks + row, tl.where(good, above + 1, 0).to(tl.int64))

    for i in tl.range(0, k):
        best = tl.max(left_max, axis=0)
        first = tl.min(tl.where(left_max == best, left_arg, 2147483647), axis=0)
        some = (first < vocab) & (bad == 0)
        tl.store(top_ids + row * k + i, tl.where(some, first, -1).to(tl.int64))
        value = tl.where(some, best - total, MINUS_INF)
        tl.store(top_values + row * k + i, tl.where(bad, nan, value))
        chunk = first // BLOCK
        v = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row_logits + v, mask=(v < vocab) & some, other=MINUS_INF).to(tl.float32)
        after = (v < vocab) & ((x < best) | ((x == best) & (v > first)))
        next_max = tl.max(tl.where(after, x, MINUS_INF), axis=0)
        next_arg = tl.min(tl.where(after & (x == next_max), v, 2147483647), axis=0)
        left_max = tl.where(c == chunk, next_max, left_max)
        left_arg = tl.where(c == chunk, next_arg, left_arg)
