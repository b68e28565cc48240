"""A step of any shape runs the one function that was made at start: nothing is traced again."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_engine
import torch
from tiny_models import prompts

from llmc.compiler import capture


def test_fifty_shapes_cause_no_compilation(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = tiny_engine.start(dense.path)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled after start")

    counters = torch._dynamo.utils.counters
    counters.clear()
    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(capture, "make_fx", refuse)
    step = running.started.runner.step
    shapes = set()
    submit = running.started.runner.submit

    def watched(plan: Any) -> Any:
        shapes.add((plan.num_tokens, len(plan.work)))
        return submit(plan)

    monkeypatch.setattr(running.started.runner, "submit", watched, raising=False)
    for length in range(1, 51):  # prefills of 50 lengths, then decodes of growing contexts
        engine = running.engine()
        tiny_engine.generate(engine, prompts((length,)), 2)
    for rows in range(2, 9):
        tiny_engine.generate(running.engine(), prompts((3,) * rows), 3)
    assert len(shapes) >= 50
    assert (1, 1) in shapes and (50, 1) in shapes
    assert running.started.runner.step is step
    assert not counters["frames"] and not counters["stats"], dict(counters)
