"""The frontend's trial of grammars: one that it refuses never reaches the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.structured.trial import Trial, TrialSetup

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo


def make_trial(info: ModelInfo) -> Trial:
    """For a model; its process is started by the first check."""
    path = info.tokenizer_path
    setup = TrialSetup(
        tokenizer_path=None if path is None else str(path),
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
    )
    return Trial(setup)
