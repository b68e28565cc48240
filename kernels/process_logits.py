"""`process_logits`: apply each row's penalties, biases, bans and masks, before the sampler.

The tables are indexed by the request's row and live as long as the runner. A row with neutral
parameters is unchanged, so one op serves every mix of requests.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


def _shape(*, logits: Tensor, **others: object) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


@op(shape=_shape)
def process_logits(
    logits: Tensor,
    row: Tensor,
    length: Tensor,
    history: Tensor,
    prompt_len: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repeat_last_n: Tensor,
    bias_token: Tensor,
    bias_value: Tensor,
    bias_until: Tensor,
    has_mask: Tensor,
    mask: Tensor,
) -> Tensor:
    """logits [S, V] -> processed logits [S, V] float32 (a new tensor).

    row [S] int64 selects each logits row's request among N table rows; length [S] int32 is the
    number of its tokens. history [N, L] int32: its tokens, prompt first; prompt_len [N] int32.

    repetition [N] (1: off): logits of tokens in the prompt or output are divided by it if positive,
    multiplied if negative. presence, frequency [N] (0: off): subtracted once, and times the count,
    for tokens in the output. All three look at the last repeat_last_n [N] int32 tokens (0: all).
    Then bias_value [N, B] is added at bias_token [N, B] int32 (-1: unused) while the output has
    fewer than bias_until [N, B] int32 tokens.
    Finally, if has_mask [N] int32 is not 0, tokens whose bit in mask [N, ceil(V / 32)] int32 is 0
    become -inf. Token v has bit v % 32 of word v // 32. Tokens >= V in the tables are ignored.
    """
    out = logits.float().clone()
    vocab = out.shape[-1]
    for s, (r, count) in enumerate(zip(row.tolist(), length.tolist(), strict=True)):
        start = int(prompt_len[r])
        begin = max(0, count - int(repeat_last_n[r])) if int(repeat_last_n[r]) > 0 else 0
        tokens = history[r, begin:count].long()
        tokens = tokens[(tokens >= 0) & (tokens < vocab)]
        output = history[r, max(start, begin) : count].long()
        output = output[(output >= 0) & (output < vocab)]
        if float(repetition[r]) != 1:
            seen = tokens.unique()
            old = out[s, seen]
            out[s, seen] = torch.where(old > 0, old / repetition[r], old * repetition[r])
        if float(presence[r]) != 0 or float(frequency[r]) != 0:
            seen, counts = output.unique(return_counts=True)
            out[s, seen] -= presence[r] + frequency[r] * counts
        live = (bias_token[r] >= 0) & (bias_token[r] < vocab) & (count - start < bias_until[r])
        out[s].index_add_(0, bias_token[r][live].long(), bias_value[r][live])
        if bool(has_mask[r]):
            ids = torch.arange(vocab, device=out.device)
            allowed = (mask[r][ids // 32] >> (ids % 32)) & 1
            out[s].masked_fill_(allowed == 0, float("-inf"))
    return out


@process_logits.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for samples, rows, vocab, length in ((1, 1, 7, 4), (3, 5, 300, 40), (6, 8, 2049, 90)):
        pick = torch.arange(rows)
        row = torch.randperm(rows, generator=gen)[:samples]
        bias_token = torch.randint(0, vocab, (rows, 4), generator=gen)
        bias_token[:, 1] = -1
        prompt_len = torch.randint(1, length, (rows,), generator=gen)
        until = torch.tensor([2**31 - 1, 2**31 - 1, 3, 0])
        yield (
            torch.randn(samples, vocab, generator=gen).to(device, dtype),
            row.to(device),
            torch.maximum(prompt_len[row], torch.randint(1, length, (samples,), generator=gen))
            .int()
            .to(device),
            torch.randint(0, vocab, (rows, length), generator=gen).int().to(device),
            prompt_len.int().to(device),
            torch.tensor([1.0, 1.3, 0.8])[pick % 3].to(device),
            torch.tensor([0.0, 0.5])[pick % 2].to(device),
            torch.tensor([0.3, 0.0, -0.4])[pick % 3].to(device),
            torch.tensor([0, 1, 17, 1000], dtype=torch.int32)[pick % 4].to(device),
            bias_token.int().to(device),
            torch.randn(rows, 4, generator=gen).to(device),
            until.expand(rows, 4).int().contiguous().to(device),
            (pick % 2).int().to(device),
            torch.randint(-(2**31), 2**31, (rows, (vocab + 31) // 32), generator=gen)
            .int()
            .to(device),
        )
