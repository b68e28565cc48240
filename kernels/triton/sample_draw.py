"""Second half of the sampler: one program per row, no sort, no probabilities written to memory.

top-k: the threshold, the k-th highest logit, is found by bisection over floats ordered as integers,
first on the chunks' maxima, then on the logits of chunks whose maximum is at or above it.

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

# noise never exceeds -log(-log(1 - 2^-24)) = 16.64: logits further behind the leader can't win
MAX_NOISE = tl.constexpr(16.7)
MINUS_INF = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def ordered(x):
    """float32 -> int32 with the same order (-0 as 0)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_scaled(row_logits, c, vocab, temperature, BLOCK: tl.constexpr):
    v = c * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row_logits + v, mask=v < vocab, other=MINUS_INF).to(tl.float32)
    return tl.div_rn(x, tl.full([BLOCK], 1.0, tl.float32) * temperature), v


@triton.jit
def next_chunk(scaled_max, key, behind, after, CHUNKS: tl.constexpr):
    """The next chunk whose maximum has a key >= `key` and is >= `behind`; CHUNKS if none is."""
    c = tl.arange(0, CHUNKS)
    wanted = (c > after) & (ordered(scaled_max) >= key) & (scaled_max >= behind)
    return tl.min(tl.where(wanted, c, CHUNKS), axis=0)


@triton.jit
def count_reaching(row_logits, scaled_max, key, vocab, temperature,
                   BLOCK: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """How many scaled logits have a key >= `key`."""
    total = tl.sum(tl.zeros([BLOCK], tl.int32), axis=0)
    c = next_chunk(scaled_max, key, MINUS_INF, -1, CHUNKS)
    while c < CHUNKS:
        x, v = load_scaled(row_logits, c, vocab, temperature, BLOCK)
        total += tl.sum(((ordered(x) >= key) & (v < vocab)).to(tl.int32), axis=0)
        c = next_chunk(scaled_max, key, MINUS_INF, c, CHUNKS)
    return total


@triton.jit
def mass_from(row_logits, scaled_max, key, top, vocab, temperature,
              BLOCK: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Sum of exp(x - top) over scaled logits with a key >= `key`."""
    total = tl.sum(tl.zeros([BLOCK], tl.float32), axis=0)
    c = next_chunk(scaled_max, key, MINUS_INF, -1, CHUNKS)
    while c < CHUNKS:
        x, v = load_scaled(row_logits, c, vocab, temperature, BLOCK)
        weight = tl.exp2((x - top) * LOG2E)
        total += tl.sum(tl.where((ordered(x) >= key) & (v < vocab), weight, 0.0), axis=0)
        c = next_chunk(scaled_max, key, MINUS_INF, c, CHUNKS)
    return total


@triton.jit
def leader(row_logits, scaled_max, key, seed, position, vocab, temperature,
           BLOCK: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """The token with the highest scaled logit + noise among keys >= `key`, and its key."""
    best = tl.max(tl.full([BLOCK], MINUS_INF, tl.float32), axis=0)
    token = tl.min(tl.zeros([BLOCK], tl.int32), axis=0)
    token_key = key
    c = next_chunk(scaled_max, key, MINUS_INF, -1, CHUNKS)
    while c < CHUNKS:
        x, v = load_scaled(row_logits, c, vocab, temperature, BLOCK)
        keys = ordered(x)
        noisy = x + gumbel(seed, position, c * BLOCK, BLOCK)
        noisy = tl.where((keys >= key) & (v < vocab), noisy, MINUS_INF)
        winner = tl.max(noisy, axis=0)
        if winner > best:
            best = winner
            token = tl.min(tl.where(noisy == winner, v, vocab), axis=0)
            token_key = tl.max(tl.where(v == token, keys, -2147483648), axis=0)
        c = next_chunk(scaled_max, key, best - MAX_NOISE, c, CHUNKS)
    return token, token_key


@triton.jit
def kth_key(row_logits, scaled_max, k, vocab, chunks, temperature,
            BLOCK: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """The key of the k-th highest scaled logit, or a lower key that exactly k logits reach."""
    chunk_keys = ordered(scaled_max)  # entries past the last chunk are -inf, below every bound
    high = tl.max(chunk_keys, axis=0).to(tl.int64)
    low = ordered(tl.max(tl.full([CHUNKS], MINUS_INF, tl.float32), axis=0)).to(tl.int64)
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
        middle = low + (high - low + 1) // 2
        count = count_reaching(row_logits, scaled_max, middle.to(tl.int32), vocab,
                               temperature, BLOCK, CHUNKS)  # fmt: skip
        if count >= k:
            low = middle
        else:
            high = middle - 1
        if count == k:
            high = low
    return low.to(tl.int32)


@triton.jit
def draw_kernel(
    logits, chunk_max, chunk_arg, rows, temperatures, top_ks, top_ps, min_ps, seeds, positions,
    tokens, logits_row, vocab, chunks, GREEDY_BELOW: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
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
        scaled_max = tl.div_rn(maxima, tl.full([CHUNKS], 1.0, tl.float32) * temperature)
        top = tl.max(scaled_max, axis=0)
        # the lowest key of logits that can win; -inf is never sampled
        key = ordered(tl.max(tl.full([CHUNKS], MINUS_INF, tl.float32), axis=0)) + 1
        min_p = tl.load(min_ps + at)
        if min_p > 0:
            key = tl.maximum(key, ordered(top + tl.log(tl.maximum(min_p, 1.2e-38))))
        k = tl.load(top_ks + at)
        if (k > 0) & (k < vocab):
            key = tl.maximum(key, kth_key(row_logits, scaled_max, k, vocab, chunks, temperature,
                                          BLOCK, CHUNKS))  # fmt: skip
        seed = tl.load(seeds + at)
        position = tl.load(positions + row).to(tl.int64) + AHEAD
        token, token_key = leader(row_logits, scaled_max, key, seed, position, vocab,
                                  temperature, BLOCK, CHUNKS)  # fmt: skip
        top_p = tl.load(top_ps + at)
        if top_p < 1:
            allowed = top_p * mass_from(row_logits, scaled_max, key, top, vocab,
                                        temperature, BLOCK, CHUNKS)  # fmt: skip
            top_key = ordered(top)
            rejected = 1
            while rejected == 1:
                above = 0.0
                if token_key < top_key:
                    above = mass_from(row_logits, scaled_max, token_key + 1, top, vocab,
                                      temperature, BLOCK, CHUNKS)  # fmt: skip
                if (token_key >= top_key) | (above < allowed):
                    rejected = 0
                else:
                    token, token_key = leader(row_logits, scaled_max, token_key + 1, seed,
                                              position, vocab, temperature,
                                              BLOCK, CHUNKS)  # fmt: skip
        tl.store(tokens + row, token.to(tl.int64))
