"""Passes make a model faster and never another model: each can be off, and the tokens stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_engine
from tiny_models import (
    Continuation,
    continue_greedily,
    load_reference,
    prompts,
    save_checkpoint,
)

from llmc.passes.options import PipelineOptions
from llmc.passes.pipeline import pipeline

ALL = pipeline(PipelineOptions(block_size=4, max_positions=64, device_type="cpu"))
OPTIONAL = [p.name for p in ALL if not p.required]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("passes"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Continuation]:
    model = load_reference(checkpoint)
    return [continue_greedily(model, p, 10) for p in prompts((3, 21, 9))]


@pytest.mark.parametrize("off", [*OPTIONAL, "all of them"])
def test_the_tokens_are_the_same(off: str, checkpoint: Path, expected: list[Continuation]) -> None:
    names = OPTIONAL if off not in OPTIONAL else [off]
    running = tiny_engine.start(checkpoint, passes=dict.fromkeys(names, False))
    reports = running.started.info.pass_reports
    off_now = {r.removesuffix(": off") for r in reports if r.endswith(": off")}
    assert off_now == set(names)
    engine = running.engine(max_num_batched_tokens=6)
    got = tiny_engine.generate(engine, [c.prompt for c in expected], 10)
    skipped, wrong = tiny_engine.differences(expected, got)
    assert not wrong and skipped == 0
