"""What is read off a model's config before anything else is loaded."""

from __future__ import annotations

import pytest
import transformers as tf

from llmc.compiler.rotary import choose_frequencies
from llmc.startup.config_facts import unused_parts


def test_parts_besides_the_text_are_named() -> None:
    assert unused_parts(tf.LlamaConfig()) == ()
    assert unused_parts(tf.Gemma3Config()) == ("vision",)
    assert unused_parts(tf.Phi4MultimodalConfig()) == ("audio", "vision")


@pytest.mark.parametrize(
    ("length", "taken"), [(None, "long"), (64, "short"), (65, "long")], ids=str
)
def test_the_context_chooses_rotary_factors(length: int | None, taken: str) -> None:
    factors = {"short": [1.0] * 4, "long": [2.0] * 4}
    config = tf.Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        pad_token_id=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "short_factor": factors["short"],
            "long_factor": factors["long"],
        },
    )
    choose_frequencies(config, length)
    assert config.rope_parameters["short_factor"] == factors[taken]
