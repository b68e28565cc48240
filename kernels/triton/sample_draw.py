"""Second half of the sampler: one program per row, no sort, no probabilities written to memory.

A pass over a row goes over groups of chunks, and skips those whose maximum is too low. Its sums and
maxima are kept for each lane, and reduced once at its end.

top-k: the threshold, the k-th highest logit, is found by search over floats ordered as integers,
first on the chunks' maxima, then on the logits: each pass counts above three thresholds, so that
the interval shrinks to a quarter.

top-p: by rejection. The kept tokens are those with less than top_p of the probability mass strictly
above them, so every token below a rejected one is rejected too. Take the Gumbel-max winner of the
remaining tokens. If the mass above it is small enough, it is the result; otherwise only the tokens
above it remain. The first winner is rejected with probability 1 - top_p, so one or two rounds are
typical.

Both are exact, ties included, up to the rounding of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.philox import gumbel

# noise is between -log(-log(2^-24)) = -2.82 and -log(-log(1 - 2^-24)) = 16.64: a logit that is
# further behind the highest can't win
MAX_BEHIND = tl.constexpr(19.6)
LOWEST_KEY = tl.constexpr(-2147483648)
MINUS_INF = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def ordered(x):
    """float32 -> int32 with the same order (-0 as 0)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def scaled(x, temperature):
    return tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * temperature)


@triton.jit
def load_scaled(row_logits, group, vocab, temperature, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The scaled logits [GROUP * BLOCK] of the chunks from `group` on, and their tokens."""
    v = group * BLOCK + tl.arange(0, GROUP * BLOCK)
    x = tl.load(row_logits + v, mask=v < vocab, other=MINUS_INF).to(tl.float32)
    return scaled(x, temperature), v


@triton.jit
def highest_of(row_max, group, chunks, temperature, GROUP: tl.constexpr):
    """The highest scaled logit of the chunks from `group` on."""
    c = group + tl.arange(0, GROUP)
    maxima = tl.load(row_max + c, mask=c < chunks, other=MINUS_INF)
    return tl.max(scaled(maxima, temperature), axis=0)


@triton.jit
def count_reaching(row_logits, row_max, low, middle, high, vocab, chunks, temperature,
                   GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """How many scaled logits have a key >= each of three, of which `low` is the lowest."""
    of_low = tl.zeros([GROUP * BLOCK], tl.int32)
    of_middle = tl.zeros([GROUP * BLOCK], tl.int32)
    of_high = tl.zeros([GROUP * BLOCK], tl.int32)
    for group in tl.range(0, chunks, GROUP):
        if ordered(highest_of(row_max, group, chunks, temperature, GROUP)) >= low:
            x, v = load_scaled(row_logits, group, vocab, temperature, GROUP, BLOCK)
            keys = tl.where(v < vocab, ordered(x), LOWEST_KEY)
            of_low += (keys >= low).to(tl.int32)
            of_middle += (keys >= middle).to(tl.int32)
            of_high += (keys >= high).to(tl.int32)
    return tl.sum(of_low, axis=0), tl.sum(of_middle, axis=0), tl.sum(of_high, axis=0)


@triton.jit
def mass_from(row_logits, row_max, key, top, vocab, chunks, temperature,
              GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sum of exp(x - top) over scaled logits with a key >= `key`."""
    total = tl.zeros([GROUP * BLOCK], tl.float32)
    for group in tl.range(0, chunks, GROUP):
        if ordered(highest_of(row_max, group, chunks, temperature, GROUP)) >= key:
            x, v = load_scaled(row_logits, group, vocab, temperature, GROUP, BLOCK)
            weight = tl.exp2((x - top) * LOG2E)
            total += tl.where((ordered(x) >= key) & (v < vocab), weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def leader(row_logits, row_max, key, top, seed, position, vocab, chunks, temperature,
           GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The token with the highest scaled logit + noise among keys >= `key`, and its key. The highest
    logit, `top`, is among them."""
    best = tl.full([GROUP * BLOCK], MINUS_INF, tl.float32)
    tokens = tl.zeros([GROUP * BLOCK], tl.int32)
    for group in tl.range(0, chunks, GROUP):
        highest = highest_of(row_max, group, chunks, temperature, GROUP)
        if (ordered(highest) >= key) & (highest >= top - MAX_BEHIND):
            x, v = load_scaled(row_logits, group, vocab, temperature, GROUP, BLOCK)
            noisy = x + gumbel(seed, position, group * BLOCK, GROUP * BLOCK)
            better = (ordered(x) >= key) & (v < vocab) & (noisy > best)
            best = tl.where(better, noisy, best)
            tokens = tl.where(better, v, tokens)
    winner = tl.max(best, axis=0)
    token = tl.min(tl.where(best == winner, tokens, vocab), axis=0)
    own = scaled(tl.load(row_logits + token + tl.arange(0, 1)).to(tl.float32), temperature)
    return token, tl.max(ordered(own), axis=0)


@triton.jit
def kth_key(row_logits, row_max, chunk_keys, k, vocab, chunks, temperature,
            GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The key of the k-th highest scaled logit, or a lower key that exactly k logits reach.

    chunk_keys: of the chunks' maxima; past the last chunk that of -inf, below every bound.
    """
    high = tl.max(chunk_keys, axis=0).to(tl.int64)
    low = ordered(tl.max(tl.full(chunk_keys.shape, MINUS_INF, tl.float32), axis=0)).to(tl.int64)
    bound = low
    if k <= chunks:  # k maxima are at or above the bound, so at least k logits are
        top_bound = high
        while bound < top_bound:
            middle = bound + (top_bound - bound + 1) // 2
            if tl.sum((chunk_keys >= middle).to(tl.int32), axis=0) >= k:
                bound = middle
            else:
                top_bound = middle - 1
    low = bound
    while low < high:
        # k or more reach `low`, fewer than k reach `high` + 1
        first = low + (high - low + 3) // 4
        second = low + (2 * (high - low) + 3) // 4
        third = low + (3 * (high - low) + 3) // 4
        of_first, of_second, of_third = count_reaching(
            row_logits, row_max, first.to(tl.int32), second.to(tl.int32), third.to(tl.int32),
            vocab, chunks, temperature, GROUP, BLOCK,
        )  # fmt: skip
        if of_third >= k:
            low = third
            if of_third == k:
                high = low
        elif of_second >= k:
            low = second
            high = third - 1
            if of_second == k:
                high = low
        elif of_first >= k:
            low = first
            high = second - 1
            if of_first == k:
                high = low
        else:
            high = first - 1
    return low.to(tl.int32)


@triton.jit
def draw_kernel(
    logits, chunk_max, chunk_arg, rows, temperatures, top_ks, top_ps, min_ps, seeds, positions,
    tokens, logits_row, vocab, chunks, GREEDY_BELOW: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """rows [S]: where the parameters of each logits row are; None: in the same row.

    The position is positions + AHEAD.
    """
    if PDL:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    at = row
    if rows is not None:
        at = tl.load(rows + row)
    c = tl.arange(0, CHUNKS)
    maxima = tl.load(chunk_max + row * chunks + c, mask=c < chunks, other=MINUS_INF)
    highest = tl.max(maxima, axis=0)
    temperature = tl.load(temperatures + at)
    if (highest == float("inf")) | (highest == MINUS_INF):
        tl.store(tokens + row, tl.full([], -1, tl.int64))
    elif temperature < GREEDY_BELOW:
        first = tl.min(tl.where((maxima == highest) & (c < chunks), c, CHUNKS), axis=0)
        tl.store(tokens + row, tl.load(chunk_arg + row * chunks + first).to(tl.int64))
    else:
        row_logits = logits + row * logits_row
        row_max = chunk_max + row * chunks
        scaled_max = scaled(maxima, temperature)
        top = tl.max(scaled_max, axis=0)
        # the lowest key of logits that can win; -inf is never sampled
        key = ordered(tl.max(tl.full([CHUNKS], MINUS_INF, tl.float32), axis=0)) + 1
        min_p = tl.load(min_ps + at)
        if min_p > 0:
            key = tl.maximum(key, ordered(top + tl.log(tl.maximum(min_p, 1.2e-38))))
        k = tl.load(top_ks + at)
        if (k > 0) & (k < vocab):
            key = tl.maximum(key, kth_key(row_logits, row_max, ordered(scaled_max), k, vocab,
                                          chunks, temperature, GROUP, BLOCK))  # fmt: skip
        seed = tl.load(seeds + at)
        position = tl.load(positions + row).to(tl.int64) + AHEAD
        token, token_key = leader(row_logits, row_max, key, top, seed, position, vocab, chunks,
                                  temperature, GROUP, BLOCK)  # fmt: skip
        top_p = tl.load(top_ps + at)
        if top_p < 1:
            allowed = top_p * mass_from(row_logits, row_max, key, top, vocab, chunks,
                                        temperature, GROUP, BLOCK)  # fmt: skip
            top_key = ordered(top)
            rejected = 1
            while rejected == 1:
                above = 0.0
                if token_key < top_key:
                    above = mass_from(row_logits, row_max, token_key + 1, top, vocab, chunks,
                                      temperature, GROUP, BLOCK)  # fmt: skip
                if (token_key >= top_key) | (above < allowed):
                    rejected = 0
                else:
                    token, token_key = leader(row_logits, row_max, token_key + 1, top, seed,
                                              position, vocab, chunks, temperature, GROUP,
                                              BLOCK)  # fmt: skip
        tl.store(tokens + row, token.to(tl.int64))
