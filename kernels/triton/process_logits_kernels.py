"""The kernel of `process_logits`, which `sample_rows` shares: one program per row and chunk.

A program alone processes its chunk of the vocabulary: what its threads exchange, they exchange in
its part of `counts` or `out`, between barriers, and read past L1, which atomics do not update.
`counts` [S, V] int32 is scratch: bit 0 is set for a token in the prompt, and each occurrence in the
output adds 2. Rows without penalties neither clear nor read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmc.kernels.triton.counters import barrier
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.sample_stats import store_stats


@triton.jit
def needs_counts(repetition, presence, frequency, r):
    return (
        (tl.load(repetition + r) != 1)
        | (tl.load(presence + r) != 0)
        | (tl.load(frequency + r) != 0)
    )


@triton.jit
def count_tokens(counts, history, start, length, prompt, first, end, HISTORY: tl.constexpr):
    """Count the tokens in [first, end) from place `start` on; counts and history are the row's."""
    for begin in tl.range(start // HISTORY * HISTORY, length, HISTORY):
        place = begin + tl.arange(0, HISTORY)
        token = tl.load(history + place, mask=(place >= start) & (place < length), other=-1)
        here = (token >= first) & (token < end)
        output = place >= prompt
        tl.atomic_add(counts + token, 2, mask=here & output, sem="relaxed")
        tl.atomic_or(counts + token, 1, mask=here & (output == 0), sem="relaxed")


@triton.jit
def banned_words(words, history, prompt, length, WORDS: tl.constexpr, PLACES: tl.constexpr,
                 WORDS_PAD: tl.constexpr):  # fmt: skip
    """(last token of each word, whether the output ends with its other tokens)."""
    w = tl.arange(0, WORDS_PAD)
    last = tl.load(words + w * PLACES + PLACES - 1, mask=w < WORDS, other=-1)
    # the first empty word ends the list
    listed = tl.cumsum((last < 0).to(tl.int32), axis=0) == 0
    banned = listed
    for back in tl.static_range(1, PLACES):
        token = tl.load(words + w * PLACES + PLACES - 1 - back, mask=listed, other=-1)
        place = w * 0 + length - back
        here = tl.load(history + place, mask=listed & (place >= prompt), other=-2)
        banned = banned & ((token < 0) | (token == here))
    return last, banned


@triton.jit
def process_kernel(
    logits, out, counts, chunk_max, chunk_arg, rows, lengths, history, prompt_len,
    repetition, presence, frequency, repeat_last_n, bias_token, bias_value, bias_until, has_mask,
    allowed, words, logits_row, history_row, bias_row, mask_row, vocab, chunks,
    BLOCK: tl.constexpr, HISTORY: tl.constexpr, BIASES: tl.constexpr, BIASES_PAD: tl.constexpr,
    WORDS: tl.constexpr, PLACES: tl.constexpr, WORDS_PAD: tl.constexpr, STATS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_previous()
    s = tl.program_id(0).to(tl.int64)
    r = tl.load(rows + s)
    first = tl.program_id(1) * BLOCK
    end = min(first + BLOCK, vocab)
    v = first + tl.arange(0, BLOCK)
    inside = v < vocab
    length, prompt = tl.load(lengths + s), tl.load(prompt_len + r)
    history += r * history_row
    x = tl.load(logits + s * logits_row + v, mask=inside, other=0.0).to(tl.float32)
    if needs_counts(repetition, presence, frequency, r):
        counts += s * vocab
        tl.store(counts + v, tl.zeros([BLOCK], tl.int32), mask=inside)
        barrier()
        last = tl.load(repeat_last_n + r)
        start = tl.where(last > 0, tl.maximum(length - last, 0), 0)
        count_tokens(counts, history, start, length, prompt, first, end, HISTORY)
        barrier()
        count = tl.load(counts + v, mask=inside, other=0, cache_modifier=".cg")
        factor = tl.full([BLOCK], 1.0, tl.float32) * tl.load(repetition + r)
        x = tl.where(count != 0, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
        times = (count >> 1).to(tl.float32)
        penalty = tl.load(presence + r) + tl.load(frequency + r) * times
        x = tl.where(count > 1, x - penalty, x)
    is_masked = tl.load(has_mask + r) != 0
    if is_masked:
        word = tl.load(allowed + r * mask_row + v // 32, mask=inside, other=0)
        x = tl.where((word >> (v % 32)) & 1 == 1, x, float("-inf"))
    out += s * vocab
    tl.store(out + v, x, mask=inside)
    changed = 0
    if BIASES > 0:
        b = tl.arange(0, BIASES_PAD)
        token = tl.load(bias_token + r * bias_row + b, mask=b < BIASES, other=-1)
        until = tl.load(bias_until + r * bias_row + b, mask=b < BIASES, other=0)
        live = (token >= first) & (token < end) & (length - prompt < until)
        if tl.max(live.to(tl.int32), axis=0) > 0:
            if is_masked:  # after the mask: tokens that it bans are left at -inf
                word = tl.load(allowed + r * mask_row + token // 32, mask=live, other=0)
                live = live & ((word >> (token % 32)) & 1 == 1)
            value = tl.load(bias_value + r * bias_row + b, mask=live, other=0.0)
            barrier()
            tl.atomic_add(out + token, value, mask=live, sem="relaxed")
            changed = 1
    if WORDS > 0:
        words += r * WORDS * PLACES
        if tl.load(words + PLACES - 1) >= 0:
            last, banned = banned_words(words, history, prompt, length, WORDS, PLACES, WORDS_PAD)
            barrier()
            tl.store(out + last, float("-inf"), mask=banned & (last >= first) & (last < end))
            changed = 1
    if STATS:
        if changed != 0:
            barrier()
            x = tl.load(out + v, mask=inside, other=0.0, cache_modifier=".cg")
        store_stats(x, chunk_max, chunk_arg, s, tl.program_id(1), vocab, chunks, BLOCK)
