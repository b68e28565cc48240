"""`ban_words`: forbid tokens that would complete a banned sequence of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


@op(mutates=("logits",))
def ban_words(
    logits: Tensor,
    row: Tensor,
    length: Tensor,
    history: Tensor,
    prompt_len: Tensor,
    words: Tensor,
    places: int,
) -> None:
    """logits [S, V] float32: set the last token of a word to -inf if the output ends with the
    word's other tokens.

    row [S] int64 selects each logits row's request among N table rows; length [S] int32 is its
    number of tokens. history [N, L] int32: its tokens, prompt first; prompt_len [N] int32: the
    output begins there. words [N, W * places] int32: each word has `places` entries, with its
    tokens at the end and -1 before them. The first word that ends in -1 ends a row's list.
    """
    for s, (r, count) in enumerate(zip(row.tolist(), length.tolist(), strict=True)):
        output = history[r, int(prompt_len[r]) : count].tolist()
        for word in words[r].view(-1, places).tolist():
            if word[-1] < 0:
                break
            before = [token for token in word[:-1] if token >= 0]
            ends = output[len(output) - len(before) :] if len(output) >= len(before) else None
            if ends == before and word[-1] < logits.shape[1]:
                logits[s, word[-1]] = float("-inf")


@ban_words.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    rows, length, vocab, places = 5, 12, 6, 4  # few tokens, so that words do match
    for samples, num_words in ((1, 1), (4, 3), (5, 40)):
        words = torch.randint(0, vocab + 1, (rows, num_words, places), generator=gen)
        starts = torch.randint(0, places, (rows, num_words, 1), generator=gen)
        words = torch.where(torch.arange(places) < starts, -1, words)
        words[0, num_words // 2 :] = -1
        prompt_len = torch.randint(1, length, (rows,), generator=gen)
        row = torch.randperm(rows, generator=gen)[:samples]
        some = torch.randint(0, length, (samples,), generator=gen)
        yield (
            torch.randn(samples, vocab, generator=gen).to(device),
            row.to(device),
            torch.maximum(prompt_len[row], some).int().to(device),
            torch.randint(0, vocab, (rows, length), generator=gen).int().to(device),
            prompt_len.int().to(device),
            words.int().flatten(1).to(device),
            places,
        )
