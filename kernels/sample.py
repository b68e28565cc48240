"""`sample`: sample the next token of each row, with the row's own parameters and seed.

Gumbel-max: argmax(logits / temperature + Gumbel noise) is a sample from the softmax. The noise of
token v at position p of a request depends only on (seed, p, v) (Philox4x32-10, Salmon et al.,
SC 2011), so the result does not depend on the batch, the device or the implementation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op

GREEDY_BELOW = 1e-5  # a temperature under this takes the argmax
_MASK = 0xFFFFFFFF


def philox(counter: list[Tensor], key_low: Tensor, key_high: Tensor) -> list[Tensor]:
    """Philox4x32-10: four int64 tensors of 32-bit words and two key words -> four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key_low, key_high

    def multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
        # a * b does not fit in a signed int64; split b into 16-bit halves
        low, high = a * (b & 0xFFFF), a * (b >> 16)
        total = low + ((high & 0xFFFF) << 16)
        return ((high >> 16) + (total >> 32)) & _MASK, total & _MASK

    for _ in range(10):
        hi0, lo0 = multiply(0xD2511F53, c0)
        hi1, lo1 = multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """seed, position [S] int64 -> Gumbel noise [S, vocab] float32.

    Word v % 4 of Philox with counter (v // 4, position, 0, 0) and key (seed low, seed high)
    gives u = ((word >> 9) + 0.5) / 2^23, exact in float32 and inside (0, 1) (one more bit would
    round up to 1, whose noise is infinite). The noise is -log(-log(u)).
    """
    group = torch.arange((vocab + 3) // 4, device=seed.device)[None]
    zero = torch.zeros_like(group)
    pos = (position & _MASK)[:, None]
    words = philox(
        [group, pos, zero, zero], (seed & _MASK)[:, None], ((seed >> 32) & _MASK)[:, None]
    )
    word = torch.stack([w.expand(seed.shape[0], -1) for w in words], dim=-1).flatten(1)[:, :vocab]
    u = ((word >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def filter_logits(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """scaled [S, V] float32 (already divided by the temperature) -> filtered tokens set to -inf.

    In this order: min_p keeps tokens with probability >= min_p * the highest; top_k keeps the k
    highest (and ties with the k-th); top_p keeps the smallest set of the highest whose probability,
    renormalized over the remaining tokens, reaches top_p (and ties with the last).
    top_k <= 0, top_p >= 1 and min_p <= 0 turn a filter off.
    """
    ninf = float("-inf")
    vocab = scaled.shape[-1]
    floor = scaled.max(-1, keepdim=True).values + min_p.clamp(min=1e-38).log()[:, None]
    x = scaled.masked_fill((min_p > 0)[:, None] & (scaled < floor), ninf)
    ordered = x.sort(-1, descending=True).values
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()
    kth = ordered.gather(-1, k[:, None] - 1)
    x = x.masked_fill(x < kth, ninf)
    ordered = ordered.masked_fill(ordered < kth, ninf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # total probability of higher-ranked tokens
    keep = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    keep[:, 0] = True
    lowest = ordered.masked_fill(~keep, float("inf")).min(-1, keepdim=True).values
    return x.masked_fill(x < lowest, ninf)


def _shape(*, logits: Tensor, **others: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@op(shape=_shape)
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """logits [S, V] -> token [S] int64, or -1 for a row with a NaN or +inf logit or only -inf.

    temperature, top_p, min_p [S] float32; top_k [S] int32; seed, position [S] int64.
    A temperature below 1e-5 takes the argmax; ties go to the lowest id.
    """
    x = logits.float()
    highest = x.max(-1).values
    bad = x.isnan().any(-1) | ~highest.isfinite()
    greedy = temperature < GREEDY_BELOW
    scaled = x / torch.where(greedy, 1.0, temperature)[:, None]
    scaled = scaled.masked_fill(bad[:, None], 0.0)
    drawn = filter_logits(scaled, top_k, top_p, min_p) + gumbel(seed, position, x.shape[-1])
    token = torch.where(greedy, x.argmax(-1), drawn.argmax(-1))
    return torch.where(bad, -1, token)


@sample.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for rows, vocab in ((1, 5), (4, 300), (9, 2049)):
        pick = torch.arange(rows)
        yield (
            (torch.randn(rows, vocab, generator=gen) * 3).to(device, dtype),
            torch.tensor([0.0, 0.7, 1.0])[pick % 3].to(device),
            torch.tensor([0, 40, 5, 1], dtype=torch.int32)[pick % 4].to(device),
            torch.tensor([1.0, 0.9, 0.5])[pick % 3].to(device),
            torch.tensor([0.0, 0.05])[pick % 2].to(device),
            torch.randint(-(2**62), 2**62, (rows,), generator=gen).to(device),
            torch.randint(0, 2**17, (rows,), generator=gen).to(device),
        )
