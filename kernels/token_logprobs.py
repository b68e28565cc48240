"""`token_logprobs`: log-probabilities of sampled and top tokens, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


def shape(*, logits: Tensor, k: int, **others: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, k, dtype=torch.int64),
        logits.new_empty(rows, k, dtype=torch.float32),
    )


@op(shape=shape)
def token_logprobs(logits: Tensor, token: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [S, V], token [S] int64 -> log-probability of each row's token [S] float32, its rank
    [S] int64 (1 is the most likely; ties share the best rank), and the k most likely ids [S, k]
    int64 with their log-probabilities [S, k] float32; among ties the lowest id comes first.

    A token outside the vocabulary gets NaN and rank 0. If k exceeds the vocabulary, the remaining
    entries are id -1 and -inf. A row from which `sample` can't sample (NaN, +inf, only -inf) gets
    NaN, rank 0 and ids -1.
    """
    x = logits.float()
    vocab = x.shape[-1]
    highest = x.max(-1, keepdim=True).values
    bad = x.isnan().any(-1, keepdim=True) | ~highest.isfinite()
    logprobs = (x - highest).log_softmax(-1).masked_fill(bad, float("nan"))
    inside = ((token >= 0) & (token < vocab))[:, None] & ~bad
    at = token.clamp(0, vocab - 1)[:, None]
    chosen = logprobs.gather(-1, at).masked_fill(~inside, float("nan"))
    rank = ((x > x.gather(-1, at)).sum(-1, keepdim=True) + 1).masked_fill(~inside, 0)
    ids = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    values = logprobs.gather(-1, ids)
    past = (0, k - ids.shape[-1])
    ids = torch.nn.functional.pad(ids.masked_fill(bad, -1), past, value=-1)
    values = torch.nn.functional.pad(values, past, value=float("-inf")).masked_fill(
        bad, float("nan")
    )
    return chosen[:, 0], rank[:, 0], ids, values


@token_logprobs.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for rows, vocab, k in ((1, 5, 0), (3, 5, 7), (4, 300, 20), (5, 4500, 3)):
        logits = (torch.randn(rows, vocab, generator=gen) * 8).round() / 4  # many ties
        logits[0, ::3] = float("-inf")
        if rows > 4:
            logits[1, 7], logits[2, 4444], logits[3] = float("nan"), float("inf"), float("-inf")
        token = torch.randint(0, vocab, (rows,), generator=gen)
        token[1:2] = -1
        yield logits.to(device, dtype), token.to(device), k
