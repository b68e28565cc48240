"""What is read off a model's config before anything else is loaded."""

from __future__ import annotations

from typing import Any

import transformers as tf

from llmc.startup.config_facts import describe, unused_parts


def test_parts_besides_the_text_are_named() -> None:
    assert unused_parts(tf.LlamaConfig()) == ()
    assert unused_parts(tf.Gemma3Config()) == ("vision",)
    assert unused_parts(tf.Phi4MultimodalConfig()) == ("audio", "vision")


def phi3(**rope: object) -> tf.Phi3Config:
    return tf.Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        pad_token_id=None,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )


def test_the_config_says_which_texts_are_long() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long = phi3(rope_type="longrope", original_max_position_embeddings=64, **factors)
    assert describe(long).long_context_from == 64
    assert describe(phi3(rope_type="default")).long_context_from is None


def test_the_context_is_what_the_config_states() -> None:
    assert describe(tf.LlamaConfig(max_position_embeddings=4096)).context == 4096
    assert describe(tf.MptConfig(max_seq_len=8192)).context == 8192
    assert describe(tf.Mamba2Config()).context is None


def test_yarn_extends_the_context_that_the_model_was_trained_on() -> None:
    def context(most: int, **rope: Any) -> int | None:
        fields: Any = {"rope_theta": 1e4, **rope}
        return describe(
            tf.Qwen2Config(max_position_embeddings=most, rope_parameters=fields)
        ).context

    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert context(32768, **yarn, original_max_position_embeddings=32768) == 131072
    assert context(40960, **yarn, original_max_position_embeddings=32768) == 131072
    assert context(163840, **yarn, original_max_position_embeddings=4096) == 163840
    assert context(1000, **yarn) == 4000
    assert context(32768, rope_type="linear", factor=4.0) == 32768
