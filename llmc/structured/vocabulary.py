"""The data of a model's tokenizer that is needed to compile grammars, readable by any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.errors import InvalidRequestError

if TYPE_CHECKING:
    from llmc.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    tokenizer: str  # in the format of tokenizer.json
    vocab_size: int  # the width of the logits
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> Vocabulary:
        """The vocabulary of a tokenizer. InvalidRequestError if it has no such format. Without end
        token ids, the tokenizer's own end token is used."""
        if tokenizer is None:
            raise InvalidRequestError(
                "structured outputs need a tokenizer, but this model has none",
                param="structured_outputs",
                code="no_tokenizer",
            )
        backend = tokenizer.backend
        if backend is None:
            raise InvalidRequestError(
                "structured outputs need a tokenizer with a tokenizer.json, which this model "
                "does not have",
                param="structured_outputs",
            )
        own = tokenizer.eos_token_id
        ends = tuple(eos_token_ids) or (() if own is None else (own,))
        return cls(tokenizer=backend.to_str(), vocab_size=vocab_size, eos_token_ids=ends)
