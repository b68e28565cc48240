"""Rotary frequencies that depend on a sequence's length: one choice for all sequences, at load.

transformers chooses by the longest position of a batch, and again at every step. In a batch of
requests of different lengths that would turn one by the length of another, and keys that lie in the
cache were turned before. So the context that is served decides, as it does in other engines.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)


def choose_frequencies(text_config: Any, max_model_len: int | None) -> None:
    """Where the context is longer than the one trained on, all sequences take the long factors."""
    length = max_model_len or getattr(text_config, "max_position_embeddings", None) or 0
    for rope in _parameters(text_config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") != "longrope" or not original or length <= original:
            continue
        if rope["short_factor"] != rope["long_factor"]:
            rope["short_factor"] = rope["long_factor"]
            log.info(
                "rotary frequencies are those for long texts, for short ones too: the context is "
                "%d tokens, and up to %d the model has others (--max-model-len %d takes those)",
                length,
                original,
                original,
            )


def _parameters(text_config: Any) -> Iterator[dict[str, Any]]:
    """One mapping for the model, or one for every type of layer."""
    found = getattr(text_config, "rope_parameters", None)
    if not isinstance(found, dict):
        return
    for rope in (found, *found.values()):
        if isinstance(rope, dict) and "rope_type" in rope:
            yield rope
