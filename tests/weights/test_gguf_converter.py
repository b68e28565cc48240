"""Files as llama.cpp's converter writes them say what the checkpoints that they came from do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from converted_cases import CASES as FIRST
from converted_gguf import make_module, write_converted
from converted_more import MORE, beside, scales
from converted_older import OLDER
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from packed_rows import empty_parts
from transformers import AutoConfig, AutoModelForCausalLM

from llmc import LLM, SamplingParams
from llmc.errors import CheckpointError
from llmc.kernels.quantized_linear import dequantize as op_numbers
from llmc.startup.gguf_files import model_directory
from llmc.weights.checkpoint import BlockWriter
from llmc.weights.gguf.reader import read_header
from llmc.weights.gguf.rules import rules
from llmc.weights.gguf.tensors import Undo
from llmc.weights.tensors import open_tensors

CASES = FIRST | MORE | OLDER
IDS = torch.tensor([[5, 9, 123, 33, 14, 77, 31, 32, 88, 90, 20, 21, 22, 23, 55, 56, 57, 1, 0, 99]])


def read_back(path: Path) -> Any:
    """transformers' model of llmc's config and weights."""
    folder = model_directory(path)
    config = AutoConfig.from_pretrained(folder)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {name: t.read() for name, t in open_tensors(folder, None, torch.float32).items()}
    module.load_state_dict(state, strict=False)
    module.tie_weights()
    return module


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    try:
        module = make_module(CASES[name])
    except KeyError as e:
        if (name, e.args) != ("latent, dense", ("factor",)):
            raise
        pytest.skip("this transformers' MiniCPM3 needs a factor, which longrope need not have")
    path = write_converted(tmp_path / "m.gguf", CASES[name], module)
    with torch.no_grad():
        want = module(IDS, use_cache=False).logits
        got = read_back(path)(IDS, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.std()))


def test_interleaved_experts_keep_their_bits(tmp_path: Path) -> None:
    case = CASES["interleaved experts"]
    path = write_converted(
        tmp_path / "m.gguf", case, make_module(case), {"_exps.weight": GGMLQuantizationType.MXFP4}
    )
    found = open_tensors(model_directory(path), None, torch.float32)
    joined: Any = found["model.layers.0.mlp.experts.gate_up_proj"]
    to = joined.kept_as()
    assert to is not None and to.format == "mxfp4" and to.transposed
    stored = {}
    for kind in ("gate", "up"):
        info = read_header(path).tensors[f"blk.0.ffn_{kind}_exps.weight"]
        raw = path.read_bytes()[info.offset : info.offset + info.num_bytes]
        rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(4, 64, -1)
        stored[kind] = torch.from_numpy(dequantize(rows.numpy(), info.type))
    want = torch.stack((stored["gate"], stored["up"]), dim=2).flatten(1, 2).mT
    assert torch.equal(joined.read(), want)
    out = empty_parts(to, 4, *joined.shape[:0:-1])
    joined.write_blocks(to, BlockWriter(out))
    got = [op_numbers(w, s) for w, s in zip(out["weight"], out["scale"], strict=True)]
    assert torch.equal(torch.stack(got), want.mT)


def test_columns_by_group_keep_their_bits(tmp_path: Path) -> None:
    sizes = {"linear_value_head_dim": 32, "linear_key_head_dim": 32}
    case = CASES["linear attention"]
    case = replace(
        case,
        fields={**case.fields, **sizes},
        metadata={**case.metadata, "ssm.state_size": 32, "ssm.inner_size": 128},
    )
    module = make_module(case)
    path = write_converted(
        tmp_path / "m.gguf", case, module, {"ssm_out": GGMLQuantizationType.Q8_0}
    )
    found: Any = open_tensors(model_directory(path), None, torch.float32)
    name = next(name for name in found if name.endswith("linear_attn.out_proj.weight"))
    original, to = module.state_dict()[name], found[name].kept_as()
    rounded = torch.from_numpy(
        dequantize(quantize(original.numpy(), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    )
    assert torch.equal(found[name].read(), rounded)
    assert to is not None and to.format == "int8"
    out = empty_parts(to, *found[name].shape)
    found[name].write_blocks(to, BlockWriter(out))
    assert torch.equal(op_numbers(out["weight"], out["scale"]), rounded)


def test_rows_of_two_tensors_keep_their_bits(tmp_path: Path) -> None:
    """Queries, keys and values are one tensor, gates another: the model has them by head."""
    case = CASES["linear attention, joined"]
    module = make_module(case)
    path = write_converted(tmp_path / "m.gguf", case, module, {"attn_": GGMLQuantizationType.Q8_0})
    found = open_tensors(model_directory(path), None, torch.float32)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    joined: Any = found[name]
    assert len(joined.parts) == 2 and joined.kept_as() is not None
    rounded = dequantize(
        quantize(module.state_dict()[name].numpy(), joined.parts[0].type), joined.parts[0].type
    )
    assert torch.equal(joined.read(), torch.from_numpy(rounded))


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        (
            "latent",
            {"expert_weights_norm": True},
            "'deepseek2' whose softmax over experts is normalized again are not served",
        ),
        (
            "latent, sigmoid of experts",
            {"attention.temperature_scale": 0.1},
            "'deepseek2' whose queries are scaled by their position are not served",
        ),
        ("states or attention", {"rope.scaling.finetuned": True}, "with rotary positions"),
        ("chunks", {"attention.sliding_window": 0}, "do not say which layers have rotary"),
        ("gates of attention", {"expert_gating_func": 1}, "'afmoe' with a softmax over experts"),
        ("more keys in a window", {"attention.value_scale": None}, "not say how values are scaled"),
        ("pairs, as many layers as have rotary positions", {"block_count": 31}, "other than 32 la"),
        (
            "pairs, as many layers as have rotary positions",
            {"block_count": 40},
            r"with 40 layers \(13B\), whose scores depend on the distance \(ALiBi\), are not",
        ),
        ("biases by distance", {"attention.max_alibi_bias": 0.0}, "not bias scores by distance"),
        ("one loop over the layers", {"num_loops": 2}, "whose layers run several times"),
        (
            "delta attention of full rank, or gated latent",
            {"swiglu_clamp_exp": [0.0, 7.0, 7.0]},
            "with clamps within experts",
        ),
        (
            "a window and compressed entries, hyper-connections",
            {"swiglu_clamp_shexp": [0.0, 7.0, 0.0, 0.0]},
            "with other clamps of shared experts",
        ),
        ("joined heads, groups of experts", {"expert_gating_func": 1}, "a softmax over experts"),
        ("two rotary bases, one of them scaled", {"expert_gating_func": 2}, "a sigmoid of experts"),
        (
            "linear attention",
            {"ssm.inner_size": 0},
            "has 0 as ssm.inner_size and 4 as ssm.time_step_rank, but both should be positive",
        ),
    ],
)
def test_what_transformers_has_no_model_for_is_refused(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = replace(CASES[name], metadata={**CASES[name].metadata, **metadata})
    path = write_converted(tmp_path / "m.gguf", case, make_module(case))
    with pytest.raises(CheckpointError, match=message):
        model_directory(path)


def test_a_head_that_its_model_normalizes_is_stored_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Baichuan 2 has another vocabulary than Baichuan, whose head is a plain linear."""
    case = CASES["pairs, as many layers as have rotary positions"]
    rule = rules()["architectures"][case.architecture]
    [variant] = [v for v in rule["variants"] if "steps" in v]
    monkeypatch.setitem(variant, "when", {"rows of token_embd.weight": 128})
    module = make_module(case)
    path = write_converted(tmp_path / "m.gguf", case, module)
    with torch.no_grad():
        module.lm_head.weight.copy_(torch.nn.functional.normalize(module.lm_head.weight))
        want = module(IDS, use_cache=False).logits
        got = read_back(path)(IDS, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.std()))


def test_a_class_that_transformers_does_not_register_is_named(tmp_path: Path) -> None:
    case = replace(CASES["latent"], architecture="mistral4")
    path = write_converted(tmp_path / "m.gguf", case, make_module(case))
    with pytest.raises(CheckpointError, match="'mistral4' are not served: transformers has its"):
        model_directory(path)


def test_numbers_that_differ_within_a_kind_of_layers_are_refused(tmp_path: Path) -> None:
    case = CASES["heads of two sizes, keys as values, experts"]
    uneven = replace(case, metadata={**case.metadata, "attention.head_count_kv": [2, 1, 1, 1]})
    path = write_converted(tmp_path / "m.gguf", uneven, make_module(case))
    with pytest.raises(CheckpointError, match=r"has \[2, 1, 1, 1\] as attention.head_count_kv"):
        model_directory(path)


def test_frequencies_that_are_scaled_are_not_taken_for_unused_ones(tmp_path: Path) -> None:
    case = CASES["heads of two sizes"]
    scaled = replace(case, change=beside(scales, rope_freqs__weight=[1.0] * 4 + [2.0] * 12))
    path = write_converted(tmp_path / "m.gguf", scaled, make_module(case))
    with pytest.raises(CheckpointError, match="either used as it is or not"):
        model_directory(path)


def test_rows_that_are_cut_keep_their_bits(tmp_path: Path) -> None:
    """Of queries and keys whose rotary halves lie side by side, too."""
    case = CASES["joined heads in pairs"]
    module = make_module(case)
    path = write_converted(tmp_path / "m.gguf", case, module, {"attn_": GGMLQuantizationType.Q8_0})
    found = open_tensors(model_directory(path), None, torch.float32)
    for kind in "qkv":
        name = f"model.layers.1.self_attn.{kind}_proj.weight"
        part: Any = found[name]
        assert part.kept_as() is not None
        raw = quantize(module.state_dict()[name].numpy(), GGMLQuantizationType.Q8_0)
        want = torch.from_numpy(dequantize(raw, GGMLQuantizationType.Q8_0))
        assert torch.equal(part.read(), want)


def test_a_joined_tensor_of_other_sizes_is_refused(tmp_path: Path) -> None:
    case = replace(
        CASES["interleaved halves, joined heads"], metadata={"attention.head_count_kv": 4}
    )
    path = write_converted(tmp_path / "m.gguf", case, make_module(case))
    with pytest.raises(CheckpointError, match=r"no place in .*'blk.0.attn_qkv.weight'"):
        model_directory(path)


def test_an_engine_turns_complex_numbers_by_the_files_factors(tmp_path: Path) -> None:
    case = CASES["chunks"]
    path = write_converted(tmp_path / "m.gguf", case, make_module(case))
    prompt = IDS[0].tolist()
    with torch.no_grad():
        want = read_back(path)(IDS, use_cache=False).logits[0].log_softmax(-1)
    with LLM(str(path), dtype="float32", opt_level=0, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([prompt], params, progress=False)
    told = output.prompt_logprobs
    assert told is not None
    for i, token in enumerate(prompt[1:]):
        assert told[i + 1][token].logprob == pytest.approx(float(want[i, token]), abs=2e-5)  # type: ignore[index]


def test_numbers_of_the_metadata_are_there_for_each_layer(tmp_path: Path) -> None:
    case = CASES["activation by layer"]
    module = make_module(case)
    path = write_converted(tmp_path / "m.gguf", case, module)
    data = path.read_bytes()
    assert data.count(b"xielu.alpha_p") == 1
    path.write_bytes(data.replace(b"xielu.alpha_p", b"xielu.alpha_q"))
    with pytest.raises(CheckpointError, match="has no xielu.alpha_p for layer 0"):
        model_directory(path)


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    """A model without them would say something else."""
    case = CASES["mixture"]
    path = write_converted(
        tmp_path / "m.gguf", replace(case, metadata={"expert_count": 0}), make_module(case)
    )
    with pytest.raises(
        CheckpointError, match="8 tensors of m.gguf have no place.*; use the safetensors"
    ):
        model_directory(path)


def test_what_the_metadata_asks_for_must_be_there(tmp_path: Path) -> None:
    case = CASES["logit scale"]
    module = make_module(case)
    for key, value, message in (
        ("block_count", 2**31, "states 2147483648 layers, but has tensors for 2"),
        ("feed_forward_length", 2**31, "has shape"),
        ("embedding_length", 2**20, "has shape"),
        ("embedding_length", 2**31, "can't build the model"),
    ):
        changed = replace(case, metadata={key: value})
        with pytest.raises(CheckpointError, match=message):
            model_directory(write_converted(tmp_path / f"{key}.gguf", changed, module))


@pytest.mark.parametrize("groups", [0, 3, "two"])
def test_columns_that_are_no_whole_groups_are_refused(groups: Any) -> None:
    undo = Undo(
        architecture="qwen35",
        config={"linear_num_key_heads": groups, "linear_num_value_heads": 4},
        rule={"steps": {"ssm_out": "columns of values by group"}},
    )
    with pytest.raises(CheckpointError, match="'blk.0.ssm_out.weight' has the wrong shape"):
        undo.columns("blk.0.ssm_out.weight", 16)
