"""At -O2 Inductor's code gives the same greedy tokens, for every size of step from one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from tiers import tiered
from tiny_configs import save_random, tiny_config
from tiny_engine import differences, generate
from tiny_models import FAMILIES, continue_greedily, load_reference, prompts, save_checkpoint

from llmc.passes.options import PipelineOptions
from llmc.startup import compile as compile_module

pytestmark = pytest.mark.slow
LENGTHS = (1, 5, 19, 33)
NUM_TOKENS = 10
MAX_SECONDS = 300  # compiling is slow on a busy machine; an error ends the wait at once


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "ops"),
    [
        ("mixtral", ("add_linear", "sort_experts")),
        ("qwen3", ("add_linear", "rope_attention")),
        ("qwen3_next", ("add_linear", "torch_conv_delta_rule")),
        ("mamba2", ("add_linear", "torch_conv_scan")),
    ],
)
def test_passes_for_gpus_compile(
    family: str, ops: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them those that insert ops that write in place, and that have several results."""

    def for_gpus(**options: Any) -> PipelineOptions:
        return PipelineOptions(**{**options, "device_type": "cuda"})

    monkeypatch.setattr(compile_module, "PipelineOptions", for_gpus)
    path = _checkpoint(family, tmp_path)
    model = load_reference(path)
    expected = [continue_greedily(model, p, NUM_TOKENS) for p in prompts(LENGTHS)]
    running = tiny_engine.start(path, opt_level=2)
    graph = running.started.runner.step.uncompiled
    assert graph is not None and running.started.runner.step.level == 2
    assert all(f"llmc_{name}" in graph.source for name in ops)
    got = generate(running.engine(), [r.prompt for r in expected], NUM_TOKENS)
    assert differences(expected, got) == (0, [])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, in Inductor
@pytest.mark.parametrize("family", tiered(["qwen3", "gemma2", "mixtral", "qwen3_next"], "qwen3"))
def test_compiled_step_equals_transformers(family: str, tmp_path: Path) -> None:
    path = _checkpoint(family, tmp_path)
    model = load_reference(path)
    expected = [continue_greedily(model, p, NUM_TOKENS) for p in prompts(LENGTHS)]
    running = tiny_engine.start(path, opt_level=2)
    started = running.started
    assert started.upgrade is not None
    assert started.upgrade.wait(MAX_SECONDS), started.upgrade.error
    assert started.runner.step.level == 2
    compiled = _compiled_graphs()
    for chunk, num_blocks in ((256, None), (5, None), (9, 12)):
        engine = running.engine(max_num_batched_tokens=chunk, num_blocks=num_blocks)
        got = generate(engine, [r.prompt for r in expected], NUM_TOKENS)
        skipped, wrong = differences(expected, got)
        assert not wrong, f"{family}, steps of {chunk} tokens: " + "; ".join(wrong)
        assert skipped <= 2
    assert _compiled_graphs() == compiled, "a step of another size was compiled anew"


def _checkpoint(family: str, path: Path) -> Path:
    if family in FAMILIES:
        return save_checkpoint(family, path)
    return save_random(tiny_config(family), path)


def _compiled_graphs() -> int:
    counters = torch._dynamo.utils.counters
    return counters["aot_autograd"]["total"] + counters["inductor"]["fxgraph_cache_miss"]
