"""Packed tensors become the numbers that they stand for; what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import (
    MODULE,
    PACKINGS,
    Packing,
    awq,
    drawn,
    fbgemm,
    float_quantized,
    fp8,
    gptq,
    int_quantized,
    mxfp4,
    pack_quantized,
    read_stored,
    store_one,
)

from llmc.errors import CheckpointError
from llmc.kernels.quantized_linear import dequantize
from llmc.weights.quantized import stored_weights
from llmc.weights.quantized.kept_quantized import blocks_of, kept_weights
from llmc.weights.quantized.quantization_config import read_quantization


@pytest.mark.parametrize("name", PACKINGS)
def test_numbers_are_those_of_the_packer(name: str, tmp_path: Path) -> None:
    found, numbers = store_one(tmp_path, PACKINGS[name](), drawn())
    assert set(found) == {f"{MODULE}.weight"}, "scales and the like are not left over"
    weight = found[f"{MODULE}.weight"]
    assert weight.shape == (56, 96)
    torch.testing.assert_close(weight.read(), numbers, rtol=1e-6, atol=0)


def test_sizes_that_fill_no_whole_words(tmp_path: Path) -> None:
    packing = pack_quantized(4, -1, symmetric=False)
    found, numbers = store_one(tmp_path, packing, drawn(50, 90))
    torch.testing.assert_close(found[f"{MODULE}.weight"].read(), numbers, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(64, 32), (64, 64), (64, 128), (9, 10), (8, 48)])
def test_blocks_of_4_bits_may_begin_anywhere(shape: tuple[int, int], tmp_path: Path) -> None:
    found, numbers = store_one(tmp_path, PACKINGS["nf4 with nested scales"](), drawn(*shape))
    torch.testing.assert_close(found[f"{MODULE}.weight"].read(), numbers, rtol=1e-6, atol=0)


def test_numbers_are_rounded_once(tmp_path: Path) -> None:
    found, numbers = store_one(tmp_path, awq(32), drawn(), torch.bfloat16)
    weight = found[f"{MODULE}.weight"]
    out = torch.full((58, 96), float("nan"), dtype=torch.bfloat16)
    weight.read(out[1:57])
    assert torch.equal(out[1:57], numbers.bfloat16()) and torch.equal(weight.read(), out[1:57])
    assert out[0].isnan().all() and out[57].isnan().all()


def test_long_weights_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.weights.quantized.unpack._AT_ONCE", 96 * 5)
    found, numbers = store_one(tmp_path, fp8((32, 48)), drawn())
    torch.testing.assert_close(found[f"{MODULE}.weight"].read(), numbers, rtol=1e-6, atol=0)


def test_stacked_experts(tmp_path: Path) -> None:
    weight = torch.stack([drawn(64, 48), drawn(64, 48) * 3])
    tensors, numbers = mxfp4(weight)
    named = {f"experts.down_proj{suffix}": t for suffix, t in tensors.items()}
    got = read_stored(tmp_path, named, {"quant_method": "mxfp4"}, torch.float32)
    assert torch.equal(got["experts.down_proj"].read(), numbers)
    assert got["experts.down_proj"].shape == (2, 64, 48)


def test_stacked_experts_with_scales_of_columns(tmp_path: Path) -> None:
    """As `fbgemm_fp8` stores [experts, inputs, channels]."""
    q, scale = drawn(64, 96).view(2, 32, 96).to(torch.float8_e4m3fn), torch.rand(2, 1, 96)
    tensors = {"experts.gate_up_proj": q, "experts.gate_up_proj_scale": scale}
    got = read_stored(tmp_path, tensors, {"quant_method": "fbgemm_fp8"}, torch.float32)
    assert torch.equal(got["experts.gate_up_proj"].read(), q.float() * scale)


def test_scales_that_are_powers_of_two_in_a_byte(tmp_path: Path) -> None:
    q = drawn().to(torch.float8_e4m3fn)
    exponent = torch.randint(120, 132, (2, 2), dtype=torch.uint8)
    config = {"quant_method": "fp8", "weight_block_size": [32, 48], "scale_fmt": "ue8m0"}
    want = q.float() * (2.0 ** (exponent.float() - 127)).repeat_interleave(32, 0)[
        :56
    ].repeat_interleave(48, 1)
    for scale in (exponent, exponent.view(torch.float8_e8m0fnu)):
        tensors = {f"{MODULE}.weight": q, f"{MODULE}.weight_scale_inv": scale}
        got = read_stored(tmp_path, tensors, config, torch.float32)
        assert torch.equal(got[f"{MODULE}.weight"].read(), want)


@pytest.mark.parametrize("suffix", ["scale", "qscale_weight"])
def test_scales_may_have_other_names(suffix: str, tmp_path: Path) -> None:
    packing = fp8((32, 48))
    tensors, numbers = packing.pack(drawn())
    named = {
        f"{MODULE}.weight": tensors["weight"],
        f"{MODULE}.{suffix}": tensors["weight_scale_inv"],
    }
    got = read_stored(tmp_path, named, packing.config, torch.float32)
    assert set(got) == {f"{MODULE}.weight"}
    torch.testing.assert_close(got[f"{MODULE}.weight"].read(), numbers, rtol=1e-6, atol=0)


def test_experts_may_have_4_bits_where_others_have_8(tmp_path: Path) -> None:
    """As of DeepSeek V4."""
    eight, expert = fp8((32, 48)), "layers.0.ffn.experts.3.w1"
    parts, want = eight.pack(drawn())
    named = {f"{MODULE}.weight": parts["weight"], f"{MODULE}.scale": parts["weight_scale_inv"]}
    parts, numbers = PACKINGS["mxfp4"]().pack(drawn(48, 96))
    named[f"{expert}.weight"] = parts["weight_packed"].view(torch.int8)
    named[f"{expert}.scale"] = parts["weight_scale"].view(torch.float8_e8m0fnu)
    config = {**eight.config, "expert_dtype": "fp4", "scale_fmt": "ue8m0"}
    got = read_stored(tmp_path, named, config, torch.float32)
    assert set(got) == {f"{MODULE}.weight", f"{expert}.weight"}
    torch.testing.assert_close(got[f"{MODULE}.weight"].read(), want, rtol=1e-6, atol=0)
    assert torch.equal(got[f"{expert}.weight"].read(), numbers)
    ((_, to),) = [one for one in kept_weights(got) if one[0].startswith(expert)]
    assert to.format == "mxfp4"
    (blocks,) = blocks_of(got[f"{expert}.weight"], to)
    assert torch.equal(dequantize(**blocks), numbers)


def test_groups_of_config_json_go_by_name(tmp_path: Path) -> None:
    """Two schemes in one checkpoint: the one whose pattern fits, and the one for the rest."""
    small, wide = pack_quantized(4, 32, symmetric=True), pack_quantized(8, -1, symmetric=False)
    config = json.loads(json.dumps(wide.config))
    config["config_groups"]["a"] = {
        **small.config["config_groups"]["group_0"],
        "targets": [r"re:.*\.down_proj$"],
    }
    named, want = {}, {}
    for packing, module in ((small, "mlp.down_proj"), (wide, "mlp.up_proj")):
        tensors, want[f"{module}.weight"] = packing.pack(drawn())
        named |= {f"{module}.{suffix}": t for suffix, t in tensors.items()}
    got = read_stored(tmp_path, named, config, torch.float32)
    for name, numbers in want.items():
        torch.testing.assert_close(got[name].read(), numbers, rtol=1e-6, atol=0)


def test_a_name_goes_before_patterns(tmp_path: Path) -> None:
    """As with compressed-tensors, whatever the order of the groups is."""
    small, wide = pack_quantized(4, 32, symmetric=True), pack_quantized(8, -1, symmetric=True)
    config = json.loads(json.dumps(small.config))
    config["config_groups"]["group_0"]["targets"] = [r"re:.*_proj$"]
    config["config_groups"]["group_1"] = {
        **wide.config["config_groups"]["group_0"],
        "targets": [MODULE],
    }
    tensors, numbers = wide.pack(drawn())
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    got = read_stored(tmp_path, named, config, torch.float32)
    torch.testing.assert_close(got[f"{MODULE}.weight"].read(), numbers, rtol=1e-6, atol=0)


def grouped_like(*groups: tuple[Packing, list[str]]) -> dict[str, Any]:
    config = json.loads(json.dumps(groups[0][0].config))
    config["config_groups"] = {
        f"group_{i}": {
            **packing.config["config_groups"]["group_0"],
            "format": packing.config["format"],
            "targets": targets,
        }
        for i, (packing, targets) in enumerate(groups)
    }
    return {**config, "format": "mixed-precision"}


SYMMETRIC, ASYMMETRIC = (pack_quantized(4, 32, symmetric=s) for s in (True, False))
EIGHT, BYTES = pack_quantized(8, -1, symmetric=True), int_quantized()


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        # Classes: the tensors tell which group is meant.
        ([(SYMMETRIC, ["Linear"]), (EIGHT, ["Embedding", "re:.*router"])], {"up": 0, "tokens": 1}),
        ([(SYMMETRIC, ["Linear"]), (ASYMMETRIC, ["Experts"])], {"up": 0, "experts.0.up": 1}),
        ([(SYMMETRIC, ["Embedding"]), (BYTES, ["Linear"])], {"tokens": 0, "up": 1}),
        # Names and patterns go before classes, whatever the order; of patterns, the first
        # in alphabetical order counts.
        ([(SYMMETRIC, ["Linear", r"re:.*down$"]), (EIGHT, ["Linear"])], {"down": 0, "up": 1}),
        ([(SYMMETRIC, [r"re:.*up$"]), (EIGHT, [r"re:.*\.up$", "down"])], {"a.up": 1, "down": 1}),
        ([(EIGHT, [r"re:.*p$"]), (SYMMETRIC, [r"re:.*\.up$"])], {"a.up": 1, "up": 0}),
    ],
)
def test_groups_may_mix_classes_patterns_and_names(
    groups: Any, expected: dict[str, int], tmp_path: Path
) -> None:
    named, want = {}, {}
    for module, group in expected.items():
        tensors, want[f"{module}.weight"] = groups[group][0].pack(drawn())
        named |= {f"{module}.{suffix}": t for suffix, t in tensors.items()}
    got = read_stored(tmp_path, named, grouped_like(*groups), torch.float32)
    assert set(got) == set(want)
    for name, numbers in want.items():
        torch.testing.assert_close(got[name].read(), numbers, rtol=1e-6, atol=0)


def test_tensors_that_fit_no_group_are_named_once(tmp_path: Path) -> None:
    config = grouped_like((SYMMETRIC, ["Linear"]), (EIGHT, ["Embedding"]))
    tensors, _ = SYMMETRIC.pack(drawn())
    tensors["weight_scale"] = tensors["weight_scale"][:, :2]
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    with pytest.raises(CheckpointError, match=r"weight_scale has shape \[56, 2\].*requires"):
        read_stored(tmp_path, named, config, torch.float32)


def test_blocks_may_be_spelled_as_text(tmp_path: Path) -> None:
    packing = float_quantized("block")
    config = json.loads(json.dumps(packing.config))
    config["config_groups"]["group_0"]["weights"]["block_structure"] = "32x48"
    tensors, numbers = packing.pack(drawn())
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    got = read_stored(tmp_path, named, config, torch.float32)
    torch.testing.assert_close(got[f"{MODULE}.weight"].read(), numbers, rtol=1e-6, atol=0)


def test_modules_of_gptq_may_have_bits_of_their_own(tmp_path: Path) -> None:
    four, eight = gptq(4, 32), gptq(8, 64)
    config = {**four.config, "dynamic": {"+:.*up": {"bits": 8, "group_size": 64}, "-:.*gate": {}}}
    tensors, numbers = eight.pack(drawn())
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    got = read_stored(tmp_path, named, config, torch.float32)
    torch.testing.assert_close(got[f"{MODULE}.weight"].read(), numbers, rtol=1e-6, atol=0)


def test_modules_of_auto_round_may_have_bits_of_their_own(tmp_path: Path) -> None:
    config = {
        **PACKINGS["auto-round as gptq"]().config,
        "extra_config": {MODULE: {"bits": 8, "group_size": 64, "sym": False}, "a": {"bits": 16}},
    }
    tensors, numbers = gptq(8, 64).pack(drawn())
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    got = read_stored(tmp_path, named, config, torch.float32)
    torch.testing.assert_close(got[f"{MODULE}.weight"].read(), numbers, rtol=1e-6, atol=0)
    found = read_quantization({"quantization_config": config})
    assert found is not None and found.expected("a", ["Linear"]) is None


def test_modules_of_modelopt_may_have_algorithms_of_their_own(tmp_path: Path) -> None:
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            MODULE: {"quant_algo": "NVFP4", "group_size": 16},
            "down": {"quant_algo": "FP8"},
        },
    }
    tensors, four = PACKINGS["nvfp4 of modelopt"]().pack(drawn())
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    tensors, eight = fp8(None).pack(drawn())
    named |= {f"down.{suffix}": t for suffix, t in tensors.items()}
    got = read_stored(tmp_path, named, config, torch.float32)
    for name, numbers in ((MODULE, four), ("down", eight)):
        torch.testing.assert_close(got[f"{name}.weight"].read(), numbers, rtol=1e-6, atol=0)


def test_modules_of_quark_may_have_formats_of_their_own(tmp_path: Path) -> None:
    config = PACKINGS["fp8 of quark"]().config
    config["layer_quant_config"] = {
        "*up_proj": {"weight": {"dtype": "fp4", "group_size": 32}},
        "*gate*": {"weight": None},
    }
    tensors, numbers = PACKINGS["mxfp4 of quark"]().pack(drawn())
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    got = read_stored(tmp_path, named, config, torch.float32)
    torch.testing.assert_close(got[f"{MODULE}.weight"].read(), numbers, rtol=1e-6, atol=0)
    found = read_quantization({"quantization_config": config})
    assert found is not None and found.expected("a.gate_proj", ["Linear"]) is None


def test_what_is_not_used_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    stored_weights._log_once.cache_clear()
    tensors, _ = fp8(None).pack(drawn())
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    named["model.layers.0.self_attn.k_scale"] = torch.tensor(1.0)
    got = read_stored(tmp_path, named, fp8(None).config, torch.float32)
    assert set(got) == {f"{MODULE}.weight"}
    assert "fp8 quantizes activations too; llmc does so for fp8 weights only" in caplog.text
    assert "1 KV cache scales in the checkpoint are not used" in caplog.text
    read_stored(tmp_path, named, fp8(None).config, torch.float32)
    assert caplog.text.count("quantizes activations") == 1


def test_scales_of_inputs_that_belong_to_a_weight_are_refused(tmp_path: Path) -> None:
    packing = PACKINGS["nvfp4 of modelopt"]()
    tensors, _ = packing.pack(drawn())
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    named[f"{MODULE}.pre_quant_scale"] = torch.ones(96)
    with pytest.raises(CheckpointError, match="pre_quant_scale scales the inputs of a quantized"):
        read_stored(tmp_path, named, packing.config, torch.float32)


def test_zero_points_of_inputs_are_no_weights(tmp_path: Path) -> None:
    packing = int_quantized()
    tensors, numbers = packing.pack(drawn())
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    named[f"{MODULE}.input_scale"] = torch.tensor([0.5])
    named[f"{MODULE}.input_zero_point"] = torch.tensor([3], dtype=torch.int8)
    got = read_stored(tmp_path, named, packing.config, torch.float32)
    assert set(got) == {f"{MODULE}.weight"}
    torch.testing.assert_close(got[f"{MODULE}.weight"].read(), numbers, rtol=1e-6, atol=0)


def without(suffix: str) -> Any:
    return lambda tensors: tensors.pop(suffix)


def shaped(suffix: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({suffix: torch.zeros(shape, dtype=tensors[suffix].dtype)})


def typed(suffix: str, dtype: torch.dtype) -> Any:
    return lambda tensors: tensors.update({suffix: tensors[suffix].to(dtype)})


@pytest.mark.parametrize(
    ("packing", "change", "words"),
    [
        (gptq(4, 32), without("scales"), "up_proj.scales is missing"),
        (gptq(4, 32), without("qzeros"), "up_proj.qzeros is missing"),
        (gptq(4, 32), shaped("scales", 3, 55), "scales has shape [3, 55]"),
        (gptq(4, 32), shaped("scales", 4, 56), "requires [3, 56]"),
        (gptq(4, 32), shaped("g_idx", 95), "g_idx has shape [95]"),
        (gptq(4, 32), typed("qweight", torch.int64), "qweight is int64 instead of int32"),
        (awq(32), shaped("qzeros", 3, 6), "qzeros has shape [3, 6]; its weight requires [3, 7]"),
        (
            awq(32),
            shaped("qweight", 96, 7, 1),
            "qweight has shape [96, 7, 1] instead of 2 dimensions",
        ),
        (PACKINGS["awq for gemv"](), shaped("qzeros", 56, 0), "96 inputs have 3 groups of 32"),
        (PACKINGS["awq for gemv"](), shaped("scales", 56, 3), "scales has shape [56, 3]"),
        (fp8((32, 48)), without("weight_scale_inv"), "up_proj.weight_scale is missing"),
        (fp8((32, 48)), shaped("weight_scale_inv", 2, 3), "every 32 by 48 requires [2, 2]"),
        (fp8(None), shaped("weight_scale", 7), "requires one scale, or one per channel"),
        (fp8(None), typed("weight_scale", torch.int32), "weight_scale is int32 instead of float32"),
        (pack_quantized(4, 32, symmetric=False), without("weight_zero_point"), "is missing"),
        (pack_quantized(4, 32, symmetric=True), shaped("weight_scale", 56, 2), "requires [56, 3]"),
        (PACKINGS["nf4"](), without("weight.absmax"), "weight.absmax is missing"),
        (
            PACKINGS["nf4"](),
            shaped("weight.absmax", 83),
            "weight.absmax has shape [83]; its weight",
        ),
        (PACKINGS["nf4"](), shaped("weight", 2687, 1), "56 by 96 values in 4 bits take 2688 bytes"),
        (
            PACKINGS["nf4"](),
            shaped("weight.quant_state.bitsandbytes__nf4", 9),
            "quant_state.bitsandbytes__nf4 can't be read",
        ),
        (PACKINGS["torchao int8"](), typed("_weight_qdata", torch.int32), "torchao's formats llmc"),
        (PACKINGS["torchao int8"](), without("_weight_scale"), "up_proj.weight_scale is missing"),
        (PACKINGS["nvfp4"](), without("weight_global_scale"), "weight_global_scale is missing"),
        (PACKINGS["nvfp4"](), shaped("weight_global_scale", 2), "it must be one number"),
        (PACKINGS["nvfp4"](), typed("weight_scale", torch.uint8), "weight_scale is uint8 instead"),
        (PACKINGS["nvfp4"](), shaped("weight_scale", 56, 3), "requires [56, 6]"),
        (
            pack_quantized(4, 32, symmetric=True),
            lambda tensors: tensors.update({"weight_shape": torch.tensor([56, 80])}),
            "has shape [56, 12] with 4 bits per value",
        ),
        (pack_quantized(4, 32, symmetric=True), shaped("weight_shape", 0), "has shape [0]; its"),
        (pack_quantized(4, 32, symmetric=True), shaped("weight_shape"), "requires [2]"),
        (
            pack_quantized(4, 32, symmetric=True),
            typed("weight_shape", torch.float32),
            "weight_shape is float32 instead of int32 or int64",
        ),
        (
            pack_quantized(4, -1, symmetric=True),
            typed("weight_packed", torch.uint8),
            "does not match what quantization_config describes for it",
        ),
        (
            PACKINGS["nvfp4"](),
            typed("weight_packed", torch.int32),
            "does not match what quantization_config describes for it",
        ),
        (gptq(4, 32), typed("g_idx", torch.float8_e5m2), "g_idx is float8_e5m2 instead of int32"),
        (gptq(4, -1), shaped("qweight", 0, 56), "qweight has shape [0, 56], so it has no values"),
        (fp8(None), shaped("weight", 56, 0), "weight has shape [56, 0], so it has no values"),
        (PACKINGS["awq for gemv"](), shaped("qzeros"), "qzeros has shape [] instead of 2"),
        (fbgemm(), shaped("weight_scale", 56, 0), "requires one scale, or one per channel"),
        (
            PACKINGS["nf4"](),
            shaped("weight.quant_state.bitsandbytes__nf4", 1, 9),
            "has shape [1, 9] instead of 1 dimensions",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    packing: Any, change: Any, words: str, tmp_path: Path
) -> None:
    tensors, _ = packing.pack(drawn())
    change(tensors)
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    with pytest.raises(CheckpointError) as caught:
        read_stored(tmp_path, named, packing.config, torch.float32)
    assert MODULE in str(caught.value) and words in str(caught.value)


DTYPES = (
    *(torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e8m0fnu),
)


def damaged(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor with other shapes, other types and other values."""
    shape, shapes = tuple(tensor.shape), {(), (0,), (1,), (0, 0), (*tensor.shape, 1)}
    for dim, size in enumerate(shape):
        shapes |= {(*shape[:dim], *shape[dim + 1 :]), (*shape[:dim], 0, *shape[dim + 1 :])}
        shapes |= {(*shape[:dim], n, *shape[dim + 1 :]) for n in (size - 1, size + 1, 2 * size)}
    yield from (torch.zeros(other).to(tensor.dtype) for other in sorted(shapes - {shape}))
    yield from (torch.zeros(shape).to(dtype) for dtype in DTYPES if dtype != tensor.dtype)
    yield from (torch.full(shape, value).to(tensor.dtype) for value in (-1.0, 7.0, 1e9))


@pytest.mark.parametrize("name", PACKINGS)
def test_damaged_files_are_read_or_refused_with_one_error(name: str, tmp_path: Path) -> None:
    packing = PACKINGS[name]()
    tensors, _ = packing.pack(drawn())
    refused = 0
    for suffix, tensor in tensors.items():
        for other in damaged(tensor):
            named = {f"{MODULE}.{s}": t for s, t in {**tensors, suffix: other}.items()}
            try:
                got = read_stored(tmp_path, named, packing.config, torch.float32)
                kept = dict(kept_weights(got))
                for stored, weight in got.items():
                    weight.read()
                    if stored in kept:
                        list(blocks_of(weight, kept[stored]))
            except CheckpointError as error:
                refused += 1
                assert "\n" not in str(error) and MODULE in str(error)
    assert refused > 5 * len(tensors)


def test_a_group_that_is_not_there_is_named(tmp_path: Path) -> None:
    tensors, _ = gptq(4, 32).pack(drawn())
    tensors["g_idx"][5] = 3
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    got = read_stored(tmp_path, named, gptq(4, 32).config, torch.float32)
    with pytest.raises(CheckpointError, match="g_idx names group 3, but there are only 3"):
        got[f"{MODULE}.weight"].read()


def test_bits_of_another_layout_are_refused(tmp_path: Path) -> None:
    tensors, _ = awq(32).pack(drawn())
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    with pytest.raises(CheckpointError, match=r"describes for it \(fp8, plain, 8 bits\)"):
        read_stored(tmp_path, named, fp8(None).config, torch.float32)


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def grouped(**changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **changes}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }


def test_integers_of_4_bits_may_take_a_byte(tmp_path: Path) -> None:
    """As compressed-tensors stores those whose inputs are to be quantized too."""
    scale = drawn().view(56, 3, 32).abs().amax(-1) / 7
    q = (drawn() / scale.repeat_interleave(32, 1)).round()
    config = {**grouped(), "format": "int-quantized"}
    named = {f"{MODULE}.weight": q.to(torch.int8), f"{MODULE}.weight_scale": scale}
    got = read_stored(tmp_path, named, config, torch.float32)[f"{MODULE}.weight"].read()
    torch.testing.assert_close(got, q * scale.repeat_interleave(32, 1), rtol=1e-6, atol=0)


def rotated(*locations: str) -> dict[str, Any]:
    applied = [{"location": location, "targets": ["Linear"]} for location in locations]
    return {**grouped(), "transform_config": {"config_groups": {"R1": {"apply": applied}}}}


def test_rotations_may_be_part_of_the_stored_weights() -> None:
    found = read_quantization({"quantization_config": rotated("weight_output", "weight_input")})
    assert found == read_quantization({"quantization_config": grouped()})


def test_values_beyond_the_stated_bits_are_refused(tmp_path: Path) -> None:
    packing = int_quantized(4)
    tensors, _ = packing.pack(drawn())
    tensors["weight"][3, 5] = 9
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    with pytest.raises(CheckpointError, match="values from -7 to 9, although.*4 bits"):
        read_stored(tmp_path, named, packing.config, torch.float32)[f"{MODULE}.weight"].read()


@pytest.mark.parametrize(
    ("backend", "layout", "zeros_less_one"),
    [
        (None, "gptq", True),
        ("auto_round:gptq:exllamav2", "gptq", True),
        ("auto_round:exllamav2", "gptq", False),
        ("auto_round:awq", "awq", False),
    ],
)
def test_older_configs_of_auto_round(
    backend: str | None, layout: str, zeros_less_one: bool
) -> None:
    """They name kernels instead of a packing format, and the method with its vendor."""
    config = {**PACKINGS["auto-round as gptq"]().config, "quant_method": "intel/auto-round"}
    config |= {"packing_format": None, "backend": backend}
    found = read_quantization({"quantization_config": config})
    assert found is not None
    [scheme] = found.schemes
    assert (scheme.layout, scheme.zeros_less_one) == (layout, zeros_less_one)


def test_auto_round_need_not_name_the_packing_of_float8() -> None:
    config = {**PACKINGS["auto-round, fp8"]().config}
    del config["packing_format"]
    found = read_quantization({"quantization_config": config})
    assert found is not None
    [scheme] = found.schemes
    assert (scheme.layout, scheme.bits, scheme.is_float) == ("plain", 8, True)


def test_torchaos_configs_of_modules() -> None:
    """Names go before patterns, which must match all of a name; null leaves a module plain."""

    def intx(bits: int, mapping: str) -> dict[str, Any]:
        stored = {"_type": "torch.dtype", "_data": f"int{bits}"}
        return {
            "_type": "IntxWeightOnlyConfig",
            "_data": {"weight_dtype": stored, "mapping_type": {"_data": mapping}},
        }

    by_name = {
        "_default": intx(4, "ASYMMETRIC"),
        "model.embed_tokens.weight": intx(8, "SYMMETRIC"),
        "re:.*proj": {"_type": "Float8WeightOnlyConfig", "_data": {}},
        "lm_head": None,
    }
    default = {"_type": "FqnToConfig", "_data": {"fqn_to_config": by_name}}
    found = read_quantization(
        {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": default}}}
    )
    assert found is not None and found.plain_modules == ("lm_head",)
    (embedding,) = found.schemes_of("model.embed_tokens")
    assert (embedding.bits, embedding.symmetric, embedding.is_float) == (8, True, False)
    (projection,) = found.schemes_of("model.q_proj")
    assert projection.is_float
    *_, usual = found.schemes_of("model.q_proj.other")
    assert (usual.bits, usual.symmetric, usual.is_float) == (4, False, False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("awq", "is 'awq' instead of an object"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq'; llmc supports fp8"),
        ({"bits": 4}, "quant_method is None"),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}},
            },
            "quant_type is Int4WeightOnlyConfig",
        ),
        ({"quant_method": ["gptq"], "bits": 4}, "quant_method is ['gptq']; llmc supports fp8"),
        ({"quant_method": "gptq", "bits": 5}, "bits is 5; llmc supports 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": True}, "bits is True"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; it must be"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "is 'marlin'"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}},
            "not a valid regular expression",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version is 'marlin'"),
        ({"quant_method": "awq", "w_bit": 8}, "w_bit is 8; llmc supports 4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"quant_method": "fp8", "activation_scheme": "x"}, "activation_scheme is 'x'"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
            "must be a list of module names",
        ),
        (grouped(num_bits=3), "group_0.weights.num_bits is 3"),
        (grouped(strategy="tensor_group"), "strategy is 'tensor_group'"),
        (grouped(type="float"), "type is 'float', which is never packed"),
        ({**grouped(), "format": "marlin-24"}, "format is 'marlin-24'"),
        ({**grouped(group_size=8), "format": "nvfp4-pack-quantized"}, "group_size is 8"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllamav2"},
            "packing_format is 'auto_round:exllamav2'",
        ),
        ({"quant_method": "bitnet", "quantization_mode": "online"}, "mode is 'online'"),
        ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm adds norms"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "without quantized_layers"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}},
            },
            "quantized_layers.a.quant_algo is 'W4A8_AWQ'",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "rotation_config": {"type": "hadamard"}},
            "rotation_config rotates the inputs",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "data_type": "int_asym_dq"},
            "data_type is 'int_asym_dq'",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}},
            "global_quant_config.weight.dtype is 'int4'; llmc supports fp8_e4m3, fp4",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp4"}},
                "layer_type_quant_config": {"Linear": {}},
            },
            "layer_type_quant_config is not supported",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "MXDynamicActivationMXWeightConfig"}},
            },
            "quant_type is MXDynamicActivationMXWeightConfig",
        ),
        ({**grouped(), "ignore": ["re:("]}, "not a valid regular expression"),
        ({**grouped(), "transform_config": {"a": 1}}, "transform_config rotates the inputs"),
        (rotated("weight_input", "input"), "transform_config rotates the inputs"),
        ({**grouped(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**grouped(), "config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 is"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(config: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_quantization({"quantization_config": config})
    message = str(caught.value)
    assert message.startswith("quantization_config in config.json: ") and words in message
    assert "\n" not in message and len(message) < 500


def test_plain_checkpoints_have_none() -> None:
    assert read_quantization({"hidden_size": 3}) is None
    assert read_quantization({"quantization_config": None, "text_config": {}}) is None


@pytest.mark.parametrize("name", ["nf4", "bitsandbytes in 8 bits"])
def test_older_configs_of_bitsandbytes_do_not_name_it(name: str) -> None:
    config = PACKINGS[name]().config
    unnamed = {field: value for field, value in config.items() if field != "quant_method"}
    found = read_quantization({"quantization_config": unnamed})
    assert found == read_quantization({"quantization_config": config})


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")])
def test_weights_of_mlx_are_refused_by_name(keys: tuple[str, ...]) -> None:
    """Without a method, and in a dtype that is not read."""
    with pytest.raises(CheckpointError, match="of MLX.*use another quantization"):
        read_quantization(dict.fromkeys(keys, {"group_size": 64, "bits": 4}))


def test_a_text_model_inside_has_its_own() -> None:
    found = read_quantization({"text_config": {"quantization_config": awq(32).config}})
    assert found is not None and found.method == "awq"
