"""The frontend's trial of grammars: a grammar that fails it never reaches the engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from llmc.structured.trial import Trial
from llmc.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo
    from llmc.text.tokenizer import Tokenizer


def make_trial(info: ModelInfo, tokenizer: Tokenizer | None) -> Trial:
    """The trial for a model. Its process is started by the first check."""
    size, ends = info.vocab_size, info.eos_token_ids
    return Trial(partial(Vocabulary.of, tokenizer, vocab_size=size, eos_token_ids=ends))
