"""The kernels of `process_logits`: count a request's tokens, apply the counts, add biases.

`counts` [S, V] int32 is scratch: bit 0 is set for a token in the prompt, and each occurrence in the
output adds 2. Rows without penalties neither clear nor read it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def needs_counts(repetition, presence, frequency, r):
    return (
        (tl.load(repetition + r) != 1)
        | (tl.load(presence + r) != 0)
        | (tl.load(frequency + r) != 0)
    )


@triton.jit
def clear_kernel(counts, rows, repetition, presence, frequency, vocab, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    r = tl.load(rows + s)
    if needs_counts(repetition, presence, frequency, r):
        v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(counts + s * vocab + v, tl.zeros([BLOCK], tl.int32), mask=v < vocab)


@triton.jit
def count_kernel(
    counts, rows, lengths, history, prompt_len, repetition, presence, frequency,
    history_row, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    r = tl.load(rows + s)
    length = tl.load(lengths + s)
    first = tl.program_id(1) * BLOCK
    if first < length:  # noqa: SIM102 - a kernel's `and` would evaluate both
        if needs_counts(repetition, presence, frequency, r):
            place = first + tl.arange(0, BLOCK)
            inside = place < length
            token = tl.load(history + r * history_row + place, mask=inside, other=-1)
            inside = inside & (token >= 0) & (token < vocab)
            output = place >= tl.load(prompt_len + r)
            tl.atomic_add(counts + s * vocab + token, 2, mask=inside & output, sem="relaxed")
            tl.atomic_or(counts + s * vocab + token, 1, mask=inside & (output == 0), sem="relaxed")


@triton.jit
def apply_kernel(
    logits, out, counts, rows, repetition, presence, frequency, has_mask, allowed,
    logits_row, mask_row, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    r = tl.load(rows + s)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocab
    x = tl.load(logits + s * logits_row + v, mask=inside, other=0.0).to(tl.float32)
    if needs_counts(repetition, presence, frequency, r):
        count = tl.load(counts + s * vocab + v, mask=inside, other=0)
        factor = tl.full([BLOCK], 1.0, tl.float32) * tl.load(repetition + r)
        x = tl.where(count != 0, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
        times = (count >> 1).to(tl.float32)
        penalty = tl.load(presence + r) + tl.load(frequency + r) * times
        x = tl.where(count > 1, x - penalty, x)
    if tl.load(has_mask + r) != 0:
        word = tl.load(allowed + r * mask_row + v // 32, mask=inside, other=0)
        x = tl.where((word >> (v % 32)) & 1 == 1, x, float("-inf"))
    tl.store(out + s * vocab + v, x, mask=inside)


@triton.jit
def bias_kernel(
    out, rows, lengths, prompt_len, bias_token, bias_value, bias_until, has_mask, allowed,
    bias_row, mask_row, vocab, BIASES: tl.constexpr, BIASES_PAD: tl.constexpr,
):  # fmt: skip
    """After the mask, so tokens it bans are left at -inf."""
    s = tl.program_id(0).to(tl.int64)
    r = tl.load(rows + s)
    output = tl.load(lengths + s) - tl.load(prompt_len + r)
    b = tl.arange(0, BIASES_PAD)
    listed = b < BIASES
    token = tl.load(bias_token + r * bias_row + b, mask=listed, other=-1)
    until = tl.load(bias_until + r * bias_row + b, mask=listed, other=0)
    live = (token >= 0) & (token < vocab) & (output < until)
    if tl.load(has_mask + r) != 0:
        word = tl.load(allowed + r * mask_row + token // 32, mask=live, other=0)
        live = live & ((word >> (token % 32)) & 1 == 1)
    value = tl.load(bias_value + r * bias_row + b, mask=live, other=0.0)
    tl.atomic_add(out + s * vocab + token, value, mask=live, sem="relaxed")
