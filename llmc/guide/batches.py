"""Packs training texts into full rows of tokens, one behind the other, with a weight each."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch
from tokenizers import Tokenizer

from llmc.guide.conversations import QUESTION_WEIGHT, Conversations, Piece
from llmc.guide.manual import Manual
from llmc.guide.tokenizer import SPECIAL_TOKENS


class Batches:
    """Draws batches of rows. A text that is cut by the end of its row is not continued."""

    def __init__(self, manual: Manual, tokenizer: Tokenizer, seed: int) -> None:
        self._texts: Iterator[list[Piece]] = iter(Conversations(manual, Random(seed)))
        self._rng = Random(seed + 2)
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def draw(self, num_rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [num_rows, length] and the weight of each token as a target."""
        rows = [self._row(length) for _ in range(num_rows)]
        ids = torch.tensor([row[0] for row in rows])
        weights = torch.tensor([row[1] for row in rows])
        return ids, weights

    def _row(self, length: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            for text, weight in next(self._texts):
                piece = self._encode(text)
                ids += self._noisy(piece) if weight == QUESTION_WEIGHT else piece
                weights += [weight] * len(piece)
        return ids[:length], weights[:length]

    def _noisy(self, piece: list[int]) -> list[int]:
        """Now and then a token of a question is lost or another, so that no single one decides."""
        if len(piece) < 8 or self._rng.random() < 0.8:
            return piece
        vocab_size = self._tokenizer.get_vocab_size()
        noisy = list(piece)
        at = self._rng.randrange(len(piece) - 2)  # the end of the message stays
        if self._rng.random() < 0.5:
            del noisy[at]
        else:
            noisy[at] = self._rng.randrange(len(SPECIAL_TOKENS), vocab_size)
        return noisy

    def _encode(self, text: str) -> list[int]:
        """Ids of one piece; pieces meet at line ends or special tokens, where no token spans."""
        ids = self._known.get(text)
        if ids is None:
            ids = self._known[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
