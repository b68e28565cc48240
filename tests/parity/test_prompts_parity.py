"""A model whose attention gets the prompts of a step answers as without, compiled or not.

On a CPU the hint is passed on and ignored; tests/kernels/interpreted_prompts.py and tests/gpu show
what a GPU does with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import tiny_engine
import torch
from shared_captures import shared_captures
from tiny_models import prompts, save_checkpoint

from llmc.check.check import check_model
from llmc.compiler.lower import StepFunction
from llmc.config import EngineConfig
from llmc.kernels.prompts import Prompts
from llmc.passes import pipeline, split_prompts
from llmc.runner.delta import LEAST_TOKENS

LENGTHS = (3, 17, 30)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("prompts"), dtype=torch.bfloat16)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Prompts]]:
    """The pass serves every device, and two tokens make a prompt; what steps get is kept."""
    given: list[Prompts] = []
    monkeypatch.setattr("llmc.kernels.prompts.MIN_TOKENS", 2)
    monkeypatch.setitem(LEAST_TOKENS, "long_prompts", 2)
    monkeypatch.setattr(
        pipeline,
        "split_prompts",
        lambda **_: split_prompts.split_prompts(),
    )
    words = Prompts.words

    def kept(self: Prompts) -> torch.Tensor:
        given.append(self)
        return words(self)

    monkeypatch.setattr(Prompts, "words", kept)
    yield given


def answers(path: Path, level: int) -> tuple[list[list[int]], StepFunction]:
    running = tiny_engine.start(path, dtype="bfloat16", opt_level=level)
    engine = running.engine(max_num_batched_tokens=16)
    got = tiny_engine.generate(engine, [list(p) for p in prompts(LENGTHS)], 8)
    return [one.tokens for one in got], running.started.runner.step


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, in Inductor
def test_answers_stay_the_same(checkpoint: Path, everywhere: list[Prompts]) -> None:
    with mock.patch.object(pipeline, "split_prompts", split_prompts.split_prompts):
        want, step = answers(checkpoint, 0)
    assert "prompts" not in step.inputs and everywhere == []
    got, step = answers(checkpoint, 0)
    assert "prompts" in step.inputs and got == want
    chunks = {prompts.lengths for prompts in everywhere}
    assert (3, 13) in chunks and (11,) in chunks and () in chunks
    compiled, step = answers(checkpoint, 2)
    assert step.level == 2 and "prompts" in step.inputs
    assert compiled == want


def test_it_is_certified(checkpoint: Path, everywhere: list[Prompts], tmp_path: Path) -> None:
    config = EngineConfig(model=str(checkpoint), device="cpu", dtype="bfloat16", opt_level=0)
    with (
        shared_captures(),
        mock.patch("llmc.check.check.cache_dir", return_value=tmp_path),
    ):
        certificate = check_model(config)
    assert certificate.certified, certificate
    assert any(len(prompts.lengths) > 1 for prompts in everywhere)
