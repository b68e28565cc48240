"""Configurations that once were refused, or answered otherwise than transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
import transformers as tf
from tiny_configs import save_random, tiny_config
from tiny_models import continue_greedily, load_reference, prompts

LENGTHS = (1, 5, 19)
NUM_TOKENS = 6
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1],
    "long_factor": [2.0, 3.0],
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "frequencies by a text's length, places on several axes": (
        "qwen3_5_text",
        {"rope_parameters": _LONGROPE},
    ),
}


@pytest.mark.parametrize("model_type, fields", VARIANTS.values(), ids=VARIANTS)
def test_a_variant_of_a_class_answers_as_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    path = save_random(tiny_config(model_type, **fields), tmp_path)
    model = load_reference(path)
    expected = [continue_greedily(model, p, NUM_TOKENS) for p in prompts(LENGTHS)]
    running = tiny_engine.start(path)
    for limits in ({}, {"num_blocks": 14, "max_num_batched_tokens": 7}):
        got = tiny_engine.generate(
            running.engine(**limits), [r.prompt for r in expected], NUM_TOKENS
        )
        assert not tiny_engine.differences(expected, got)[1]


def test_a_model_that_reads_sound_writes_text(tmp_path: Path) -> None:
    """transformers lists it with translators, and not with causal language models."""
    torch.manual_seed(0)
    model = tf.AutoModelForSeq2SeqLM.from_config(
        tiny_config("voxtral"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    expected = [continue_greedily(model, p, NUM_TOKENS) for p in prompts(LENGTHS)]
    engine = tiny_engine.start(tmp_path).engine()
    got = tiny_engine.generate(engine, [r.prompt for r in expected], NUM_TOKENS)
    assert not tiny_engine.differences(expected, got)[1]
