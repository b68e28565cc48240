"""Rotary frequencies that depend on the length of a text: no request turns by another's length."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import tiny_models
import torch
import transformers as tf
from tiny_models import Continuation, continue_greedily, load_reference, prompts, save_checkpoint

TRAINED, TOKENS = 16, 6
SHORT, LONG = (5, 9), (20, 33)  # prompts that stay below TRAINED, and that begin above it
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": TRAINED,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_local_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def checkpoint(path: Path, **rope: Any) -> Path:
    return save_checkpoint(
        "phi3", path, rope_parameters=rope, original_max_position_embeddings=TRAINED
    )


def answers(path: Path, lengths: tuple[int, ...], *, use_cache: bool = True) -> list[Continuation]:
    model = load_reference(path)
    return [continue_greedily(model, p, TOKENS, use_cache=use_cache) for p in prompts(lengths)]


def uncached_answers(path: Path, lengths: tuple[int, ...]) -> list[Continuation]:
    """Those of texts that become long. transformers drops its keys then, as they were turned by
    the factors of short texts, but older versions give the model only the last token after that."""
    uncached = answers(path, lengths, use_cache=False)
    if _computes_again(path):
        cached = answers(path, lengths)
        assert [r.tokens for r in uncached] == [r.tokens for r in cached]
    return uncached


def _computes_again(path: Path) -> bool:
    """Whether this transformers gives the model the whole text once it becomes long."""
    model = load_reference(path)
    ids = torch.tensor(prompts((TRAINED + 1,)))
    cache = tf.DynamicCache(config=model.config)
    parameters = inspect.signature(model.prepare_inputs_for_generation).parameters
    given = model.prepare_inputs_for_generation(
        ids,
        **{"cache" if "cache" in parameters else "past_key_values": cache},
        attention_mask=torch.ones_like(ids),
        use_cache=True,
        next_sequence_length=1,
    )
    return bool(given["input_ids"].shape[1] == TRAINED + 1)


def check(path: Path, expected: list[Continuation], **options: Any) -> None:
    """All in one batch, whole and in chunks."""
    running = tiny_engine.start(path, **options)
    for limits in ({}, {"max_num_batched_tokens": 7}):
        engine = running.engine(**limits)
        got = tiny_engine.generate(engine, [r.prompt for r in expected], TOKENS)
        assert not tiny_engine.differences(expected, got)[1]


def test_a_context_as_trained_takes_the_short_factors(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, **LONGROPE)
    check(path, answers(path, SHORT), max_model_len=TRAINED)


def test_each_request_takes_the_factors_of_its_own_length(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", **LONGROPE)
    all_short = checkpoint(tmp_path / "s", **LONGROPE | {"long_factor": LONGROPE["short_factor"]})
    expected = answers(path, (*SHORT, *LONG))
    assert expected[2:] != answers(all_short, LONG), "the factors make no difference"
    check(path, expected)


def test_a_text_that_becomes_long_is_computed_again(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, **LONGROPE)
    expected = uncached_answers(path, (TRAINED - 3, TRAINED - 1, TRAINED, TRAINED + 1))
    check(path, expected)
    check(path, expected, speculative_config={"method": "ngram", "num_speculative_tokens": 3})


def test_the_length_may_be_a_field_that_the_config_does_not_know(tmp_path: Path) -> None:
    """transformers finds it when it builds the model; before that, it takes the whole context."""
    rope = {k: v for k, v in LONGROPE.items() if k != "original_max_position_embeddings"}
    path = save_checkpoint("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_scaling": rope, "original_max_position_embeddings": TRAINED}
    (path / "config.json").write_text(json.dumps(config))
    check(path, answers(path, (*SHORT, *LONG)))


def test_a_model_that_scales_long_texts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own code branches on the length, besides choosing frequencies by it."""
    mixtral = tiny_models.FAMILIES["mixtral"]()
    sizes = {name: getattr(mixtral, name) for name in _SIZES}
    config = partial(tf.PhimoeConfig, **sizes)
    monkeypatch.setitem(tiny_models.FAMILIES, "phimoe", config)
    path = save_checkpoint(
        "phimoe",
        tmp_path,
        rope_parameters=LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
        original_max_position_embeddings=TRAINED,
    )
    check(path, uncached_answers(path, (*SHORT, TRAINED - 3, *LONG)))


def test_long_and_short_texts_share_no_blocks(tmp_path: Path) -> None:
    """A long prompt begins with a short one that is in the prefix cache, and then the reverse."""
    path = checkpoint(tmp_path, **LONGROPE)
    model = load_reference(path)
    long = prompts((TRAINED + 9,))[0]
    running = tiny_engine.start(path, block_size=4)
    engine = running.engine()
    for length in (TRAINED - 2, len(long), TRAINED - 2, len(long)):
        expected = continue_greedily(model, long[:length], 2)
        got = tiny_engine.generate(engine, [long[:length]], 2)
        assert not tiny_engine.differences([expected], got)[1]


def test_dynamic_frequencies_are_the_plain_ones_within_the_context(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path, rope_parameters=DYNAMIC)
    check(path, answers(path, (5, 33)))
