"""Ranks with parts of quantized weights give what one process gives, token for token in float32."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
from gguf import GGMLQuantizationType as Type
from packed_checkpoints import PACKINGS, awq, fp8, gptq, pack_quantized, write_mxfp4, write_packed
from rank_threads import RankThreads, rank_threads
from tiers import tiered
from tiny_engine import Running
from tiny_gguf import ARCHITECTURES, widen_for, write_gguf
from tiny_models import prompts, save_checkpoint

from llmc.config import EngineConfig
from llmc.inspect.inspect import inspect_model

# Parts of whole blocks for 4 ranks, which cut through groups of 128 inputs.
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
PROMPTS = prompts((1, 5, 19, 12))
WIDENED = (
    *("pack-quantized int8 channel", "gptq 8 bits"),
    *("nf4", "nf4 with nested scales", "nf4 stored as bfloat16"),
)
OPS = r"\d+ llmc\.quantized_\w+\.default"


def check_ranks(
    path: Path,
    size: int,
    *,
    sums: int,
    widened: bool = False,
    inputs_widened: bool = False,
    tolerance: float = tiny_engine.LOGPROB_TOLERANCE,
    **options: Any,
) -> Running:
    """The engine of `size` ranks, after it was compared with that of one: `sums` of a step.
    `inputs_widened`: weights of which ranks have some of the inputs."""
    options = {"activation_bits": 32, **options}
    one = tiny_engine.start(path, **options)
    with rank_threads():
        many = tiny_engine.start(path, tensor_parallel_size=size, **options)
    want, got = (tiny_engine.generate(r.engine(), PROMPTS, 8) for r in (one, many))
    processes = many.started.rank_processes
    assert isinstance(processes, RankThreads)
    processes.stop()
    assert [g.tokens for g in got] == [w.tokens for w in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=tolerance)
    assert f"{sums} llmc.all_reduce.default" in report(many, "shard_linears")
    ops = [re.findall(OPS, report(running, "quantize_linears")) for running in (one, many)]
    if inputs_widened:
        assert ops == [[f"{n} llmc.quantized_linear.default"] for n in (8, 4)], "two layers"
    else:
        assert ops[0] == ops[1] and bool(ops[0]) is not widened
    config = EngineConfig(
        model=str(path), device="cpu", dtype="float32", max_model_len=64,
        tensor_parallel_size=size, **options,
    )  # fmt: skip
    weight_bytes = many.started.info.weight_bytes
    assert inspect_model(config).sizes.weight_bytes == weight_bytes < one.started.info.weight_bytes
    return many


def report(running: Running, name: str) -> str:
    (found,) = [r for r in running.started.info.pass_reports if r.startswith(name)]
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("dense"), **SIZES)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts that are stored one by one."""
    return save_checkpoint("mixtral", tmp_path_factory.mktemp("routed"), **SIZES)


@pytest.mark.parametrize(
    ("format", "size"),
    tiered([(f, n) for f in ("int8", "int4", "fp8") for n in (2, 4)], ("int4", 4)),
)
def test_weights_that_are_quantized_while_they_load(format: str, size: int, dense: Path) -> None:
    check_ranks(dense, size, sums=5, quantization=format)


@pytest.mark.parametrize(
    ("family", "format"),
    tiered([("mixtral", "int8"), ("mixtral", "int4"), ("gpt_oss", "int4")], ("mixtral", "int4")),
)
def test_routed_experts_that_are_quantized_while_they_load(
    family: str, format: str, tmp_path: Path
) -> None:
    """gpt_oss has them by input, and with a bias on their output."""
    path = save_checkpoint(family, tmp_path, **SIZES)
    check_ranks(path, 4, sums=5, quantization=format)


IN_PARTS = [name for name in PACKINGS if name not in ("fp8 in blocks", "float-quantized block")]


@pytest.mark.parametrize(
    ("packing", "size"),
    tiered(
        [*((name, 4) for name in IN_PARTS), ("fp8 in blocks of 32", 2), ("awq", 2)],
        ("fp8 in blocks of 32", 2),
        ("gptq in another order", 4),
    ),
)
def test_weights_that_are_stored_quantized(
    packing: str, size: int, dense: Path, tmp_path: Path
) -> None:
    """Those of 8 bits with zero points are widened part by part, and those in another order if
    ranks have some of their inputs."""
    stored, _ = write_packed(dense, tmp_path, PACKINGS[packing]())
    reordered = "in another order" in packing
    check_ranks(stored, size, sums=5, widened=packing in WIDENED, inputs_widened=reordered)


@pytest.mark.parametrize(
    "packing",
    tiered(
        ["gptq", "awq", "packed", "blocks"],
        "blocks",
    ),
)
def test_a_cut_through_groups_splits_them(packing: str, dense: Path, tmp_path: Path) -> None:
    """256 inputs in two groups, over four ranks."""
    made = {
        "gptq": gptq(4, 128),
        "awq": awq(128),
        "packed": pack_quantized(4, 128, symmetric=False),
        "blocks": fp8((128, 128)),
    }
    many = check_ranks(write_packed(dense, tmp_path, made[packing])[0], 4, sums=5)
    groups = {
        role.quantized.to.group
        for _, role in many.started.model.program.weight_inputs()
        if role.quantized is not None and "down_proj" in role.parts[0]
    }
    assert groups == {64}


@pytest.mark.parametrize(
    "packing",
    tiered(
        ["awq", "gptq 4 bits", "fp8 in blocks of 32", "pack-quantized int8 group"],
        "awq",
    ),
)
def test_experts_that_are_stored_one_by_one(packing: str, routed: Path, tmp_path: Path) -> None:
    check_ranks(write_packed(routed, tmp_path, PACKINGS[packing]())[0], 4, sums=5)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """By input, with a bias on their output."""
    plain = save_checkpoint("gpt_oss", tmp_path / "plain", **SIZES)
    check_ranks(write_mxfp4(plain, tmp_path)[0], 4, sums=5)


@pytest.mark.parametrize(
    ("architecture", "kind", "size", "sums"),
    tiered(
        [
            ("llama", Type.Q4_0, 2, 5),  # embedding and head are one weight of few bits
            ("llama", Type.Q8_0, 4, 5),
            ("qwen2moe", Type.Q4_1, 2, 5),  # shared experts beside the routed ones
            ("qwen3moe", Type.MXFP4, 4, 5),
            ("llama", Type.Q4_K, 2, 5),  # one cut between superblocks, one through them
            ("llama", Type.Q5_K, 2, 5),
            ("llama", Type.Q6_K, 4, 5),
            ("llama", Type.IQ4_XS, 2, 5),
            ("qwen3moe", Type.Q6_K, 2, 5),
            ("llama", Type.IQ3_S, 2, 5),
            ("qwen3moe", Type.IQ2_S, 2, 5),
            ("llama", Type.TQ2_0, 4, 5),
        ],
        ("qwen2moe", Type.Q4_1, 2, 5),
        ("llama", Type.Q4_K, 2, 5),
    ),
)
def test_gguf_files(
    architecture: str, kind: Type, size: int, sums: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "head_dim": 32,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    }  # fmt: skip
    name, fields = ARCHITECTURES[architecture]
    known = {key: value for key, value in sizes.items() if key in fields}
    monkeypatch.setitem(ARCHITECTURES, architecture, (name, {**fields, **known}))
    widen_for(kind, architecture, monkeypatch)
    path = write_gguf(tmp_path / "m.gguf", architecture, kind)
    check_ranks(path, size, sums=sums)


def test_parts_that_are_no_whole_blocks_stay_whole(tmp_path: Path) -> None:
    """160 channels of an MLP over two ranks would be 80 inputs, and blocks have 32."""
    plain = save_checkpoint("qwen3", tmp_path / "plain", **{**SIZES, "intermediate_size": 160})
    many = check_ranks(write_packed(plain, tmp_path, PACKINGS["awq"]())[0], 2, sums=3)
    assert "2 x values between linears stay whole: 160 / 2 is not a multiple of 32" in report(
        many, "shard_linears"
    )


def test_inputs_that_are_rounded_meet_parts(dense: Path, tmp_path: Path) -> None:
    """The stretches of 32 inputs that share a scale are the same ones."""
    stored, _ = write_packed(dense, tmp_path, PACKINGS["gptq 4 bits"]())
    for bits, tolerance in ((16, 1e-3), (8, 5e-2)):
        check_ranks(stored, 2, sums=5, activation_bits=bits, tolerance=tolerance)
