"""What a step takes is measured once for a program and its limits, on CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from op_cases import require_cpu_ops
from safetensors.torch import load_file
from tiny_models import save_checkpoint

from llmc.compiler.cache import ProgramCache
from llmc.config import EngineConfig
from llmc.startup import profile
from llmc.startup.bind import StepMode
from llmc.startup.compile import LoadedModel, compile_model, load_model
from llmc.startup.resolve import resolve

MODE = StepMode(level=0, kernels_built=True, max_in_flight=1)


def start(path: Path, cache: ProgramCache, **options: int) -> tuple[LoadedModel, str]:
    config = EngineConfig(model=str(path), device="cpu", max_model_len=64, **options)
    compiled = compile_model(resolve(config, torch.device("cpu")), cache)
    return load_model(compiled), compiled.key


def test_a_warm_start_runs_no_step(tmp_path: Path) -> None:
    require_cpu_ops()
    path, cache = save_checkpoint("llama", tmp_path / "model"), ProgramCache(tmp_path / "cache")
    cold, key = start(path, cache)
    tensors = load_file(path / "model.safetensors").values()
    assert cold.num_parameters == sum(tensor.numel() for tensor in tensors)
    first = profile.profile_model(cold, MODE, key=key, cache=cache)
    warm, _ = start(path, cache)
    assert warm.program.from_cache
    with mock.patch.object(profile, "make_runner", side_effect=AssertionError("a step ran")):
        again = profile.profile_model(warm, MODE, key=key, cache=cache)
        assert dataclasses.replace(again, graph=first.graph) == first
        more, _ = start(path, cache, max_num_seqs=7)
        with pytest.raises(AssertionError, match="a step ran"):
            profile.profile_model(more, MODE, key=key, cache=cache)
        on_references = dataclasses.replace(MODE, kernels_built=False)
        with pytest.raises(AssertionError, match="a step ran"):
            profile.profile_model(warm, on_references, key=key, cache=cache)
    [figure] = (tmp_path / "cache").rglob("*.figure")
    figure.write_text("-1", encoding="ascii")
    assert cache.load_figure(key, figure.stem) is None
