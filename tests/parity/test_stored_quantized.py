"""Checkpoints that are stored quantized compute what transformers does with the same numbers."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from packed_checkpoints import PACKINGS, fp8, pack_quantized, write_mxfp4, write_packed
from tiers import tiered
from tiny_configs import save_random, tiny_config
from tiny_engine import Running
from tiny_models import (
    continue_greedily,
    load_reference,
    prompts,
    reference_logits,
    save_checkpoint,
)

from llmc.check.check import check_model
from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.inspect.inspect import inspect_model
from llmc.passes.inputs import WeightInput, input_of
from llmc.weights.checkpoint import open_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("stored"), **SIZES)


def same_as_transformers(stored: Path, wide: Path, **options: Any) -> Running:
    running = tiny_engine.start(stored, activation_bits=32, **options)
    asked = prompts((3, 9, 17))
    got = tiny_engine.generate(running.engine(), asked, 6)
    model = load_reference(wide)
    want = [continue_greedily(model, prompt, 6) for prompt in asked]
    assert tiny_engine.differences(want, got) == (0, [])
    return running


def with_inputs_in_fp8(model: Any, group: int) -> Any:
    """transformers' model, whose linears but the head and routers, and whose experts, round their
    inputs as its fp8 linears do (integrations/finegrained_fp8.py)."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (-1, group or x.shape[-1]))
        scale = parts.abs().amax(-1, keepdim=True) / 448
        codes = (parts / scale).to(torch.float8_e4m3fn)
        return (codes.float() * scale).flatten(-2)

    linear = torch.nn.functional.linear

    def in_experts(forward: Any, *given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.nn.functional, "linear", lambda x, *others: linear(rounded(x), *others)
            )
            return forward(*given)

    model.set_experts_implementation("eager")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
        elif name.endswith("experts"):
            module.forward = partial(in_experts, module.forward)
    return model


@pytest.mark.parametrize(
    ("family", "name", "group"),
    [
        ("qwen3", "fp8 in blocks of 32", 32),
        ("qwen3", "float-quantized channel", 0),
        ("mixtral", "fp8 in blocks of 32", 32),
    ],
)
def test_inputs_are_rounded_to_fp8_on_request(
    family: str, name: str, group: int, tmp_path: Path
) -> None:
    """Rounding turns a last bit into a step of 1/16, so sums in another order differ visibly."""
    plain = save_checkpoint(family, tmp_path / "plain", **SIZES)
    stored, wide = write_packed(plain, tmp_path, PACKINGS[name]())
    running = tiny_engine.start(stored, activation_bits=8)
    asked = prompts((3, 9, 17, 25))
    got = tiny_engine.generate(running.engine(), asked, 1)
    exact, rounded = load_reference(wide), with_inputs_in_fp8(load_reference(wide), group)
    errors = []
    for model in (rounded, exact):
        logits = [reference_logits(model, list(prompt))[-1] for prompt in asked]
        pairs = zip(logits, got, strict=True)
        errors.append(
            torch.stack([row.log_softmax(-1)[a.tokens[0]] - a.logprobs[0] for row, a in pairs])
        )
    assert errors[0].abs().max() < 0.1 * errors[1].abs().max()
    if family == "mixtral":
        assert "+[4 llmc.quantized_expert_linear.default," in report_of(running)


def report_of(running: Running) -> str:
    (report,) = [r for r in running.started.info.pass_reports if "quantize_linears" in r]
    return report


# What stays as it is stored; tests/compiler/test_kept_quantized.py has all of them.
@pytest.mark.parametrize(
    "name",
    [
        "fp8 in blocks of 32",
        "float-quantized channel",
        "int-quantized",
        "pack-quantized int4 group",
        "gptq 4 bits",
        "gptq in another order",
        "awq",
        "mxfp4",
        "nvfp4",
    ],
)
def test_stored_bits_give_the_tokens_of_transformers(
    name: str, plain: Path, tmp_path: Path
) -> None:
    stored, wide = write_packed(plain, tmp_path, PACKINGS[name]())
    running = same_as_transformers(stored, wide)
    assert "8 llmc.quantized_linear.default]" in report_of(running), "two layers of four"
    assert ("aten.index_select" in report_of(running)) is ("another order" in name)


@pytest.mark.parametrize(
    "name",
    [
        "fp8 in blocks of 32",
        "float-quantized channel",
        "int-quantized",
        "pack-quantized int4 group",
        "gptq 4 bits",
        "awq",
        "mxfp4",
        "nvfp4",
    ],
)
def test_keys_and_values_of_channels_that_are_no_whole_blocks(name: str, tmp_path: Path) -> None:
    odd = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12}
    plain = save_checkpoint("qwen3", tmp_path / "plain", **odd)
    running = same_as_transformers(*write_packed(plain, tmp_path, PACKINGS[name]()))
    assert "12 llmc.quantized_linear.default]" in report_of(running), "two layers of six"


@pytest.mark.parametrize(
    "name",
    ["fp8 in blocks", "gptq 8 bits", "nf4"],
)
def test_others_are_widened(
    name: str, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored, wide = write_packed(plain, tmp_path, PACKINGS[name]())
    caplog.set_level("INFO")
    same_as_transformers(stored, wide)
    assert "of 14 quantized weights are dequantized to float32" in caplog.text


def test_so_are_all_on_request(plain: Path, tmp_path: Path) -> None:
    stored, wide = write_packed(plain, tmp_path, PACKINGS["awq"]())
    running = same_as_transformers(stored, wide, quantization="none")
    assert "--quantization is not set" in report_of(running)


def test_bytes_are_those_that_are_stored(plain: Path, tmp_path: Path) -> None:
    """In memory and in what `llmc inspect` works out, with the files at hand and without."""
    stored, _ = write_packed(plain, tmp_path, pack_quantized(4, 32, symmetric=True))
    running = tiny_engine.start(stored)
    kept = running.started.info.weight_bytes
    in_files = sum(t.num_bytes for n, t in open_checkpoint(stored).items() if "_shape" not in n)
    assert kept == in_files
    config = EngineConfig(model=str(stored), device="cpu", dtype="float32", max_model_len=64)
    assert inspect_model(config).sizes.weight_bytes == kept
    (stored / "model.safetensors").unlink()
    assert inspect_model(config).sizes.weight_bytes == kept


def expert_bits(model: Path) -> float:
    """In memory, of a weight of the routed experts, scales included, by `llmc inspect`."""
    config = EngineConfig(model=str(model), device="cpu", dtype="float32", max_model_len=64)
    num_bytes = num_values = 0
    for node in inspect_model(config).stages[-1].graph.graph.nodes:
        role = input_of(node)
        if isinstance(role, WeightInput) and role.quantized and "expert" in role.parts[0]:
            value = node.meta["val"]
            num_bytes += value.numel() * value.dtype.itemsize
            if role.quantized.part == "weight":
                has_two = value.dtype in (torch.uint8, torch.float8_e5m2)
                num_values += value.numel() * (2 if has_two else 1)
    return 8 * num_bytes / num_values


@pytest.mark.parametrize(
    ("name", "bits"),
    tiered(
        [
            ("fp8 in blocks of 32", 9),
            ("pack-quantized int4 group", 4.5),
            ("gptq 4 bits", 4.75),
            ("nvfp4", 6),
        ],
        ("gptq 4 bits", 4.75),
        ("nvfp4", 6),
    ),
)
def test_experts_that_are_stored_one_by_one(
    name: str, bits: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = save_checkpoint("mixtral", tmp_path / "plain", **SIZES)
    caplog.set_level("INFO")
    stored, wide = write_packed(plain, tmp_path, PACKINGS[name]())
    running = same_as_transformers(stored, wide)
    assert "[4 llmc.quantized_expert_linear.default" in report_of(running), "two layers of two"
    assert "are dequantized" not in caplog.text
    assert expert_bits(stored) == bits


@pytest.mark.parametrize("name", ["gptq 4 bits", "gptq in another order", "awq"])
def test_weights_that_the_model_stores_inputs_first(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-2's Conv1D, whose packed weights are channels first nevertheless; `c_proj` is square."""
    packing = PACKINGS[name]()

    def pack(weight: torch.Tensor) -> Any:
        tensors, numbers = packing.pack(weight.T.contiguous())
        return tensors, numbers.T

    plain = save_checkpoint("gpt2", tmp_path / "plain", n_embd=64)
    inputs_first = dataclasses.replace(
        packing, pack=pack, plain=("transformer.wte", "transformer.wpe", "lm_head")
    )
    caplog.set_level("INFO")
    same_as_transformers(*write_packed(plain, tmp_path, inputs_first))
    assert "8 of 8 quantized weights are dequantized" in caplog.text


def test_experts_whose_form_does_not_fit_are_widened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = save_checkpoint("mixtral", tmp_path / "plain", **SIZES)
    caplog.set_level("INFO")
    same_as_transformers(*write_packed(plain, tmp_path, fp8((32, 48))))
    assert "32 of 32 quantized weights are dequantized" in caplog.text


def test_a_latent_s_weight_is_widened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config("minicpm3")
    for name, size in {**SIZES, "kv_lora_rank": 32, "q_lora_rank": 32}.items():
        setattr(config, name, size)
    plain = save_random(config, tmp_path / "plain")
    caplog.set_level("INFO")
    running = same_as_transformers(
        *write_packed(plain, tmp_path, PACKINGS["fp8 in blocks of 32"]())
    )
    assert any("2 layers cache 40 values" in r for r in running.started.info.pass_reports)
    assert "are dequantized" in caplog.text


@pytest.mark.exhaustive
def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """[E, K, N], gate and up interleaved, with a bias each."""
    plain = save_checkpoint("gpt_oss", tmp_path / "plain", **SIZES)
    stored, wide = write_mxfp4(plain, tmp_path)
    running = same_as_transformers(stored, wide)
    assert "+[4 llmc.quantized_expert_linear.default]" in report_of(running)
    assert expert_bits(stored) == 4.25
    config = EngineConfig(model=str(stored), device="cpu", dtype="float32", max_model_len=64)
    kept = running.started.info.weight_bytes
    assert inspect_model(config).sizes.weight_bytes == kept
    (stored / "model.safetensors").unlink()
    assert inspect_model(config).sizes.weight_bytes == kept


def test_check_compares_with_the_same_numbers(plain: Path, tmp_path: Path) -> None:
    """transformers' own loader is given them; it needs no quantizer's package."""
    stored, _ = write_packed(plain, tmp_path, PACKINGS["awq"]())
    config = EngineConfig(
        model=str(stored), device="cpu", dtype="float32", opt_level=0, max_model_len=64
    )
    assert check_model(config, longest_prompt=40).certified


def test_check_compares_with_inputs_in_fp8(plain: Path, tmp_path: Path) -> None:
    stored, _ = write_packed(plain, tmp_path, PACKINGS["fp8 in blocks of 32"]())
    config = EngineConfig(
        model=str(stored), device="cpu", dtype="float32", opt_level=0, max_model_len=64
    )
    found = check_model(dataclasses.replace(config, activation_bits=8), longest_prompt=40)
    assert found.certified
    results = {result.name: result for result in found.changed}
    rounding = results["round_activations"]
    assert 0.02 < rounding.logits.relative < rounding.limit.relative == 0.25
    exact = check_model(config, longest_prompt=40)
    assert exact.certified and [r.name for r in exact.changed] == ["quantize_linears"]


def test_they_are_quantized_again_on_request(plain: Path, tmp_path: Path) -> None:
    stored, _ = write_packed(plain, tmp_path, PACKINGS["awq"]())
    running = tiny_engine.start(stored, quantization="int8")
    assert "+[9 llmc.quantized_linear.default]" in report_of(running)


def test_a_config_beside_config_json_is_read(plain: Path, tmp_path: Path) -> None:
    """As NVIDIA's quantizer wrote it."""
    packing = PACKINGS["nvfp4 of modelopt"]()
    stored, wide = write_packed(plain, tmp_path, packing)
    config = json.loads((stored / "config.json").read_text())
    stated = config.pop("quantization_config")
    (stored / "config.json").write_text(json.dumps(config))
    fields = {"quant_algo": stated["quant_algo"], "kv_cache_quant_algo": "FP8", "group_size": 16}
    quantization = {**fields, "exclude_modules": ["lm_head"]}
    beside = stored / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {}, "quantization": quantization}))
    same_as_transformers(stored, wide)
    beside.write_text(json.dumps({"quantization": {**fields, "quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(CheckpointError, match="quant_algo is 'W4A8_AWQ'; llmc supports NVFP4"):
        tiny_engine.start(stored)


@pytest.mark.parametrize(
    ("name", "file"), [("gptq 4 bits", "quantize_config.json"), ("awq", "quant_config.json")]
)
def test_a_config_in_a_file_of_the_tool_is_read(
    name: str, file: str, plain: Path, tmp_path: Path
) -> None:
    """Older versions of AutoGPTQ and AutoAWQ leave config.json as it is."""
    stored, wide = write_packed(plain, tmp_path, PACKINGS[name]())
    config = json.loads((stored / "config.json").read_text())
    fields = config.pop("quantization_config")
    del fields["quant_method"]
    (stored / "config.json").write_text(json.dumps(config))
    (stored / file).write_text(json.dumps(fields))
    same_as_transformers(stored, wide)


def test_a_scheme_that_is_not_known_is_refused(plain: Path, tmp_path: Path) -> None:
    packing = PACKINGS["awq"]()
    packing.config["quant_method"] = "hqq"
    stored, _ = write_packed(plain, tmp_path, packing)
    for start in (tiny_engine.start, lambda path: inspect_model(EngineConfig(model=str(path)))):
        with pytest.raises(CheckpointError, match="quant_method is 'hqq'; llmc"):
            start(stored)
