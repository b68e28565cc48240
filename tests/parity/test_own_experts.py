"""Models whose own code loops over routed experts get the logits that this code computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import own_experts
import pytest
import tiny_engine
from own_models import PROMPTS, assert_served_logits
from rank_threads import RankThreads, rank_threads
from tiers import tiered
from tiny_adapters import peft_model, save_adapter

from llmc import LLM
from llmc.check import check
from llmc.config import EngineConfig
from llmc.errors import CompileError
from llmc.lora_request import LoRARequest

# a linear with one input has the parts of two
TARGETS = r".*(experts\.\d+|shared_experts?)\.(\w+_proj|w1|w2)|.*qkv"


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    own_experts.register()


def _adapter(block: str, path: Path) -> LoRARequest:
    model = own_experts.filled(block)
    return save_adapter(model, path, r=3, lora_alpha=5, target_modules=TARGETS)


@pytest.mark.parametrize(
    "block", tiered(own_experts.BLOCKS, "WhereEach", "SortedCounts", "Nested", "Slices", "Losses")
)
def test_logits_are_those_of_the_models_code(block: str, tmp_path: Path) -> None:
    model = own_experts.filled(block)
    model.save_pretrained(tmp_path)
    assert_served_logits(tmp_path, lambda ids: model(ids).logits)


@pytest.mark.parametrize("block", tiered(("WhereHit", "SortedCounts"), "SortedCounts"))
def test_adapters_on_experts(block: str, tmp_path: Path) -> None:
    own_experts.filled(block).save_pretrained(tmp_path)
    adapter = _adapter(block, tmp_path / "adapter")
    options: dict[str, Any] = {"enable_lora": True, "max_lora_expert_rank": 6}
    with peft_model(own_experts.filled(block), adapter) as model:
        assert_served_logits(tmp_path, lambda ids: model(ids).logits, adapter=adapter, **options)


def test_adapters_on_slices(tmp_path: Path) -> None:
    own_experts.filled("NestedSlices").save_pretrained(tmp_path)
    model, asked = own_experts.filled("NestedSlices"), ["up_proj.weight", "down_proj.weight"]
    adapter = save_adapter(
        model, tmp_path / "adapter", r=3, target_modules=[], target_parameters=asked
    )
    options: dict[str, Any] = {"enable_lora": True, "max_lora_expert_rank": 3}
    with peft_model(own_experts.filled("NestedSlices"), adapter) as adapted:
        assert_served_logits(tmp_path, lambda ids: adapted(ids).logits, adapter=adapter, **options)


def test_it_is_certified_with_adapters(tmp_path: Path) -> None:
    own_experts.filled("SortedCounts").save_pretrained(tmp_path)
    adapters = [_adapter("SortedCounts", tmp_path / "adapter")]
    assert _is_certified(tmp_path, adapters, enable_lora=True, max_lora_expert_rank=6)


@pytest.mark.parametrize("options", [{"load_format": "dummy"}, {"quantization": "int8"}])
def test_it_is_certified(options: dict[str, Any], tmp_path: Path) -> None:
    """Random weights are those of the experts one by one."""
    own_experts.filled("SortedCounts").save_pretrained(tmp_path)
    assert _is_certified(tmp_path, **options)


def _is_certified(path: Path, adapters: list[LoRARequest] | None = None, **options: Any) -> bool:
    config = EngineConfig(
        model=str(path), dtype="float32", device="cpu", opt_level=0, block_size=4, **options
    )
    with mock.patch.object(check, "cache_dir", return_value=path):
        return check.check_model(config, adapters=adapters or []).certified


def test_quantized_experts(tmp_path: Path) -> None:
    own_experts.filled("WhereEach").save_pretrained(tmp_path)
    running = tiny_engine.start(tmp_path, quantization="int4")
    (report,) = [r for r in running.started.info.pass_reports if "quantize_linears" in r]
    assert "4 llmc.quantized_expert_linear.default" in report, "two layers of two"


def test_several_ranks(tmp_path: Path) -> None:
    own_experts.filled("SortedCounts").save_pretrained(tmp_path)
    one = tiny_engine.start(tmp_path)
    with rank_threads():
        many = tiny_engine.start(tmp_path, tensor_parallel_size=2)
    want, got = (tiny_engine.generate(running.engine(), PROMPTS, 6) for running in (one, many))
    assert [g.tokens for g in got] == [w.tokens for w in want]
    (report,) = [r for r in many.started.info.pass_reports if "shard_linears" in r]
    assert "all_reduce" in report
    assert isinstance(many.started.rank_processes, RankThreads)
    many.started.rank_processes.stop()


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("Dropping", "Dropping computes its experts in a loop that is not"),
        ("AddedLoss", "the model's result depends on layers.0.mlp.loss, which"),
        ("RoutedByOthers", r"from more than the states of tokens \(router_input, x\)"),
        ("Listed", "Listed computes its experts in a loop over parameters in a list"),
        ("LoopInLayer", "LoopInLayer computes its experts in a loop among other things"),
    ],
)
def test_other_loops_are_refused_with_the_reason(block: str, reason: str, tmp_path: Path) -> None:
    own_experts.filled(block).save_pretrained(tmp_path)
    with pytest.raises(CompileError, match=reason):
        LLM(str(tmp_path), device="cpu", opt_level=0)
