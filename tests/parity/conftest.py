"""One captured engine and one set of reference continuations a family, shared by all scenarios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import tiny_engine
from shared_captures import sharing  # noqa: F401 - each model is captured once for all tests here
from tiers import tiered
from tiny_models import (
    FAMILIES,
    Continuation,
    continue_greedily,
    load_reference,
    prompts,
    save_checkpoint,
)

LENGTHS = (1, 5, 19, 33, 12, 30)
NUM_TOKENS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A family's engine, and what transformers answers to the same prompts."""

    family: str
    running: tiny_engine.Running
    model: Any  # the same in transformers
    expected: tuple[Continuation, ...]


# All that a family's engine serves stays on the worker that captured it.
ORDINARY = ("gemma3", "gpt2", "gpt_oss", "mixtral", "phi3", "qwen3")
PARAMS = tiered(sorted(FAMILIES), *ORDINARY, group="{}")


@pytest.fixture(scope="session", params=PARAMS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    path = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    model = load_reference(path)
    return Subject(
        family=request.param,
        running=tiny_engine.start(path),
        model=model,
        expected=tuple(continue_greedily(model, p, NUM_TOKENS) for p in prompts(LENGTHS)),
    )
