"""Rotary frequencies that depend on the length of a text: no request turns by another's length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_engine
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
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def checkpoint(path: Path, **rope: Any) -> Path:
    return save_checkpoint(
        "phi3", path, rope_parameters=rope, original_max_position_embeddings=TRAINED
    )


def answers(path: Path, lengths: tuple[int, ...]) -> list[Continuation]:
    model = load_reference(path)
    return [continue_greedily(model, p, TOKENS) for p in prompts(lengths)]


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


def test_a_longer_context_takes_the_long_factors_for_all(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", **LONGROPE)
    all_long = checkpoint(tmp_path / "long", **LONGROPE | {"short_factor": LONGROPE["long_factor"]})
    long = answers(path, LONG)
    assert answers(path, SHORT) != answers(all_long, SHORT), "the factors make no difference"
    assert long == answers(all_long, LONG)
    check(path, [*answers(all_long, SHORT), *long])


def test_dynamic_frequencies_are_the_plain_ones_within_the_context(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path, rope_parameters=DYNAMIC)
    check(path, answers(path, (5, 33)))
