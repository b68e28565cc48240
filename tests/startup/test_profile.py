"""What a step takes is measured once for a program and its limits, on CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from op_cases import require_cpu_ops
from safetensors.torch import load_file
from tiny_models import save_checkpoint

from llmc.compiler.cache import ProgramCache
from llmc.compiler.program import lowered
from llmc.config import EngineConfig
from llmc.speculative_config import SpeculativeConfig
from llmc.startup import profile
from llmc.startup.bind import StepMode, make_runner
from llmc.startup.compile import CompiledModel, LoadedModel, compile_model, load_model
from llmc.startup.resolve import resolve

MODE = StepMode(level=0, kernels_built=True, max_in_flight=1)


def start(path: Path, cache: ProgramCache, **options: int) -> tuple[CompiledModel, LoadedModel]:
    config = EngineConfig(model=str(path), device="cpu", max_model_len=64, **options)
    compiled = compile_model(resolve(config, torch.device("cpu")), cache)
    return compiled, load_model(compiled)


def test_a_warm_start_runs_no_step(tmp_path: Path) -> None:
    require_cpu_ops()
    path, cache = save_checkpoint("llama", tmp_path / "model"), ProgramCache(tmp_path / "cache")
    compiled, cold = start(path, cache)
    tensors = load_file(path / "model.safetensors").values()
    assert cold.num_parameters == sum(tensor.numel() for tensor in tensors)
    first = profile.profile_model(compiled, cold, MODE, cache)
    compiled, warm = start(path, cache)
    assert warm.program.from_cache
    with mock.patch.object(profile, "make_runner", side_effect=AssertionError("a step ran")):
        again = profile.profile_model(compiled, warm, MODE, cache)
        assert dataclasses.replace(again, graph=first.graph) == first
        more = start(path, cache, max_num_seqs=7)
        with pytest.raises(AssertionError, match="a step ran"):
            profile.profile_model(*more, MODE, cache)
        on_references = dataclasses.replace(MODE, kernels_built=False)
        with pytest.raises(AssertionError, match="a step ran"):
            profile.profile_model(compiled, warm, on_references, cache)
    [figure] = (tmp_path / "cache").rglob("*.figure")
    figure.write_text("-1", encoding="ascii")
    assert cache.load_figure(compiled.key, figure.stem) is None


@pytest.mark.parametrize(
    ("options", "tokens", "each"),
    [
        ({}, 2048, 5),  # 256 prompt tokens that are scored, beside 64 decodes
        ({"max_num_seqs": 256}, 2048, 2),
        ({"max_num_seqs": 256, "drafts": 5}, 2048, 6),
        ({"max_num_seqs": 256, "drafts": 5}, 1000, 3),
        ({"max_num_seqs": 256}, 100, 1),
        ({"task": "embed"}, 2048, 1),
    ],
)
def test_the_logits_of_draft_tokens_and_scored_ones_are_counted(
    options: dict[str, Any], tokens: int, each: int
) -> None:
    rows, drafts = options.get("max_num_seqs", 64), options.get("drafts")
    drafting = None
    if drafts is not None:
        drafting = SpeculativeConfig(method="ngram", num_speculative_tokens=drafts)
    config = EngineConfig(model="m", max_num_seqs=rows, speculative_config=drafting)
    pooling = object() if "task" in options else None
    model: Any = SimpleNamespace(source=SimpleNamespace(config=config, pooling=pooling))
    assert profile.most_samples(model, tokens) == each


def test_a_dummy_run_has_as_many_samples(tmp_path: Path) -> None:
    require_cpu_ops()
    _, model = start(save_checkpoint("llama", tmp_path / "model"), ProgramCache(tmp_path / "cache"))
    made = make_runner(model, lowered(model.program), MODE, num_blocks=8, max_model_len=32)
    tokens, logits = made.runner.dummy_run(3, 4, 2)
    assert len(tokens) == len(logits) == 6
