"""`sample_rows`: `process_logits`, `ban_words` and `sample` in one op."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.ban_words import ban_words
from llmc.kernels.process_logits import process_logits
from llmc.kernels.registry import Case, op
from llmc.kernels.sample import sample


def _shape(*, logits: Tensor, **others: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@op(shape=_shape)
def sample_rows(
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
    words: Tensor,
    places: int,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    ahead: int,
) -> Tensor:
    """logits [S, V] -> token [S] int64.

    The arguments are those of the three ops. The parameters of `sample` are tables [N] too, of
    which each logits row has the entries at row [S]; its position is length + ahead.
    """
    tables = (history, prompt_len, repetition, presence, frequency, repeat_last_n)
    biases = (bias_token, bias_value, bias_until)
    processed = process_logits.reference(logits, row, length, *tables, *biases, has_mask, mask)
    ban_words.reference(processed, row, length, history, prompt_len, words, places)
    parameters = (table[row] for table in (temperature, top_k, top_p, min_p, seed))
    token: Tensor = sample.reference(processed, *parameters, length.long() + ahead)
    return token


@sample_rows.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    [make] = process_logits.case_makers
    for i, case in enumerate(make(device, dtype)):
        logits, prompt_len = case[0], case[4]
        rows, vocab, places = prompt_len.shape[0], logits.shape[1], 3
        words = torch.randint(0, vocab, (rows, 2, places), generator=gen)
        words[:, 0, :2] = -1  # a banned token
        words[::2, 1] = -1
        pick = torch.arange(rows)
        yield (
            *case,
            words.flatten(1).int().to(device),
            places,
            torch.tensor([0.0, 0.7, 1.0])[pick % 3].to(device),
            torch.tensor([0, 40, 5, 1], dtype=torch.int32)[pick % 4].to(device),
            torch.tensor([1.0, 0.9, 0.5])[pick % 3].to(device),
            torch.tensor([0.0, 0.05])[pick % 2].to(device),
            torch.randint(-(2**62), 2**62, (rows,), generator=gen).to(device),
            i % 2,
        )
