"""Recorded steps: what is replayed is what would have run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import llmc.kernels.cpu  # noqa: F401
from llmc.kernels.cpu.build import load
from llmc.kernels.cpu.recording import NotRecordable, record
from llmc.kernels.quantized_linear import quantization_of, quantize
from llmc.llm import LLM
from llmc.sampling_params import SamplingParams
from tests.support.tiny_models import save_checkpoint

pytestmark = pytest.mark.skipif(not load(), reason="there are no C++ ops on this machine")


PICKED = torch.tensor([3, 0])


def ours(name: str, *args: Any) -> Any:
    return getattr(torch.ops.llmc_cpu, name)(*args)


def fill(*inputs: Tensor) -> None:
    for x in inputs:
        x.copy_(torch.randn_like(x))


@torch.inference_mode()
def test_ours_torchs_views_and_writes_are_done_again() -> None:
    x, weight, picked = torch.randn(3, 64), torch.randn(64, 64), torch.tensor([2, 0])
    sum_of_all = torch.zeros(2, 64)

    def run() -> tuple[Tensor, Tensor]:
        y = ours("linear", x, weight, None)
        y = ours("rms_norm", y.view(3, 2, 32).view(3, 64), None, 1e-5, 0.0)
        y = y.index_select(0, picked).neg() + 1  # two of torch's in a row
        sum_of_all.add_(y)
        return ours("rms_norm", y, None, 1e-5, 0.0), sum_of_all

    recorded = record(run)
    recorded.check()
    assert recorded.num_torch_calls == 3
    for _ in range(3):
        fill(x)
        before = sum_of_all.clone()
        again = [t.clone() for t in recorded.replay()]
        sum_of_all.copy_(before)
        for left, right in zip(again, run(), strict=True):
            assert torch.equal(left, right)


@torch.inference_mode()
def test_other_experts_are_read_when_the_router_chooses_others() -> None:
    x, up, down = torch.randn(3, 32), torch.randn(6, 64, 32), torch.randn(6, 32, 64)
    to = quantization_of("int8", 32, 64)
    assert to is not None
    words, scale = (t.unflatten(0, (6, -1)).contiguous() for t in quantize(down.flatten(0, 1), to))
    logits, residual = torch.randn(3, 6), torch.randn(3, 32)

    def run() -> Tensor:
        weight, expert = ours("choose_experts", logits, None, 2, True, torch.float32)
        y = ours("expert_linear", x, up, None, expert.reshape(-1), False)
        z = ours("quantized_expert_linear", y, words, scale, None, None, expert.reshape(-1))
        result: Tensor = ours("sum_experts", z, weight, torch.float32, residual)
        return result

    recorded = record(run)
    assert recorded.num_torch_calls == 0
    first = recorded.replay().clone()
    logits.neg_()
    again = recorded.replay().clone()
    assert torch.equal(again, run()) and not torch.equal(again, first)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@torch.inference_mode()
def test_lookups_of_rows_are_replayed_without_torch(dtype: torch.dtype) -> None:
    table, hidden = torch.randn(9, 5), torch.randn(1, 4, 6).half()
    ids, rows = torch.tensor([[8, 0, 3]], dtype=dtype), torch.tensor([3, 1], dtype=dtype)

    def run() -> tuple[Tensor, Tensor]:
        return torch.nn.functional.embedding(ids, table), hidden.index_select(-2, rows)

    recorded = record(run)
    assert recorded.num_torch_calls == 0
    fill(table, hidden)
    ids.copy_(torch.tensor([[2, 2, 7]]))
    for left, right in zip(recorded.replay(), run(), strict=True):
        assert torch.equal(left, right)
    for wrong in (-1, 9):
        ids[0, 1] = wrong
        with pytest.raises(RuntimeError, match=f"row {wrong} of a table of 9"):
            recorded.replay()


@torch.inference_mode()
def test_lookups_of_what_is_no_dense_row_are_called_by_torch() -> None:
    x, picked = torch.randn(4, 6), torch.tensor([2, 0])
    for run in (lambda: x.index_select(1, picked), lambda: x.T.index_select(0, picked)):
        recorded = record(run)
        assert recorded.num_torch_calls == 1
        fill(x)
        assert torch.equal(recorded.replay(), run())


@torch.inference_mode()
def test_it_flushes_subnormal_results_as_the_op_itself_does() -> None:
    x, weight = torch.randn(1, 64), torch.full((64, 64), 1e-20)
    recorded = record(lambda: ours("linear", x, weight, None))
    x.zero_()[0, 0] = 1e-20
    assert torch.equal(recorded.replay(), ours("linear", x, weight, None))
    assert (x * weight)[0, 0] > 0, "torch's own are kept"


@torch.inference_mode()
def test_an_op_that_reads_values_before_its_kernels_is_called_by_torch() -> None:
    x, weight = torch.randn(2, 32), torch.randn(4, 32, 64)[..., ::2]  # whose experts are copied
    expert = torch.tensor([0, 3])

    def run() -> Tensor:
        y: Tensor = ours("expert_linear", x, weight, None, expert, False)
        return ours("rms_norm", y, None, 1e-5, 0.0)

    recorded = record(run)
    assert recorded.num_torch_calls == 1
    expert.copy_(torch.tensor([2, 1]))
    fill(x)
    assert torch.equal(recorded.replay().clone(), run())


@torch.inference_mode()
def test_an_op_that_torch_calls_may_write_to_its_arguments_and_make_a_result() -> None:
    channels, slots = 6, torch.tensor([1, 0])
    wide, weight = torch.randn(channels, 2), torch.randn(channels, 4)
    state, start = torch.randn(3, channels, 3), torch.tensor([0, 1, 2]).int()
    length = torch.tensor([5, 9]).int()

    def run() -> Tensor:
        given = (wide.T, weight, *[None] * 4, state, start, length, slots)
        y: Tensor = ours("causal_conv", *given)
        return ours("rms_norm", y, None, 1e-5, 0.0)

    recorded = record(run)
    assert recorded.num_torch_calls == 1, "rows that are not dense are copied"
    for _ in range(2):
        fill(wide)
        before = state.clone()
        got, state_then = recorded.replay().clone(), state.clone()
        state.copy_(before)
        assert torch.equal(got, run()) and torch.equal(state, state_then)


@pytest.mark.parametrize("experts", [0, 3])
@torch.inference_mode()
def test_rows_that_had_no_adapter_may_have_one_later(experts: int) -> None:
    rows = 4 if experts else 2
    x, base, adapter = torch.randn(rows, 32), torch.randn(rows, 16), torch.zeros(2).int()
    a, b = torch.randn(1, experts or 1, 4, 32), torch.randn(1, *([3] if experts else []), 4, 16)
    bounds, expert = torch.tensor([0, 16]).int(), torch.tensor([2, 0, 1, 2]) if experts else None

    def run() -> Tensor:
        out: Tensor = ours("rms_norm", base, None, 1e-5, 0.0)
        ours("add_lora", out, x, a, b, bounds, adapter, expert)
        return out

    recorded = record(run)
    assert recorded.num_torch_calls == 0
    without = recorded.replay().clone()
    adapter.copy_(torch.tensor([0, 1]))
    assert torch.equal(recorded.replay().clone(), run())
    assert not torch.equal(run(), without)


@torch.inference_mode()
def test_what_depends_on_values_is_refused() -> None:
    x = torch.randn(2, 64)
    with pytest.raises(NotRecordable, match="on the host"):
        record(lambda: ours("rms_norm", x, None, 1e-5, float(x.sum().item() * 0))).check()
    with pytest.raises(NotRecordable, match="1 ops are torch's, and 0"):
        record(lambda: x + 1).check()


def test_a_recording_imports_no_compiler() -> None:
    """torch would import Dynamo for a dispatch mode that does not decline it: seconds."""
    code = """
import sys, torch
import llmc.kernels.cpu
from llmc.kernels.cpu.build import load
from llmc.kernels.cpu.recording import record
assert load()
x = torch.randn(2, 64)
recorded = record(lambda: torch.ops.llmc_cpu.rms_norm(x, None, 1e-5, 0.0))
recorded.check()
print(sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_answers_are_those_of_steps_that_are_not_recorded(tmp_path: Path) -> None:
    """Rows that come and go, beside each other: shapes of one to four rows, greedy and sampled."""
    path = save_checkpoint("llama", tmp_path / "model")
    prompts = [[3 + i] * (4 + i) for i in range(4)]
    params = [
        SamplingParams(max_tokens=6 + 5 * i, ignore_eos=True, temperature=i % 2, seed=i, logprobs=2)
        for i in range(4)
    ]

    def answers(llm: LLM) -> list[Any]:
        outputs = llm.generate(prompts, params, progress=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    with LLM(str(path), max_model_len=64, max_num_seqs=4, kv_cache_memory=1 << 24) as llm:
        runner: Any = llm._engine.runner  # type: ignore[union-attr]
        recordings, runner._recordings = runner._recordings, None
        expected = answers(llm)
        runner._recordings = recordings
        assert answers(llm) == expected
        assert answers(llm) == expected
        assert recordings.num_replays > 20


def test_a_compiled_step_leaves_decodes_of_few_rows_to_recordings(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "model")
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [[3, 4, 5, 6], [7, 8]]
    compiled_tokens = []
    with LLM(str(path), max_model_len=64, max_num_seqs=4, kv_cache_memory=1 << 24) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, progress=False)]
        runner: Any = llm._engine.runner  # type: ignore[union-attr]
        plain = runner.step

        def compiled(**inputs: Tensor) -> tuple[Tensor, Tensor]:
            compiled_tokens.append(inputs["token_ids"].shape[0])
            tokens: tuple[Tensor, Tensor] = plain.call(**inputs)
            return tokens

        runner.swap_step(
            replace(plain, level=1, call=compiled, min_size=2, uncompiled=plain, only_ops=False)
        )
        before = runner.num_replayed_steps
        again = [o.outputs[0].token_ids for o in llm.generate(prompts, params, progress=False)]
        assert again == expected
        assert compiled_tokens == [6], "only the prompts use the compiled step"
        assert runner.num_replayed_steps >= before + 3


@torch.inference_mode()
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.index_select(1, PICKED),  # has an overload with `out`
        lambda x: torch.ops.aten.add.Scalar(x, 2),  # its `out` overload has another name
        lambda x: torch.ops.aten.to.dtype(x, torch.float64),  # has none
        lambda x: torch.ops.aten.sum.dim_IntList(x, [0]),
        lambda x: torch.ops.aten.max.dim(x, 1)[1],  # has two results
    ],
)
def test_torchs_ops_are_replayed_into_the_same_results(call: Any) -> None:
    x = torch.randn(4, 32)

    def run() -> Tensor:
        made: Tensor = call(ours("rms_norm", x, None, 1e-5, 0.0))
        return made

    recorded = record(run)
    assert recorded.num_torch_calls == 1
    kept = recorded.results
    fill(x)
    assert recorded.replay() is kept and torch.equal(kept, run())
