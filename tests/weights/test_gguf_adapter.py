"""LoRA adapters in GGUF files do to a model what adding alpha / r * B A to its tensors does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from converted_cases import CASES
from converted_gguf import make_module, write_converted
from gguf import GGUFWriter
from safetensors.torch import load_file
from tiers import tiered
from tiny_gguf import write_gguf

from llmc import LLM, LoRARequest, SamplingParams
from llmc.errors import InvalidRequestError
from llmc.startup.adapter_files import as_peft, rank_of
from llmc.startup.gguf_files import model_directory
from llmc.weights.gguf.model import open_gguf
from llmc.weights.gguf.reader import read_header
from llmc.weights.gguf.tensors import GgufTensor

ALPHA = 6.0
Arrays = Mapping[str, np.ndarray[Any, Any]]
# adapted tensors: an embedding or head, linears whose rows or columns the converter reorders,
# joined ones, and experts
ADAPTED = {
    "mixture": "token_embd attn_q. attn_k. attn_v. ffn_gate_exps ffn_down_exps output.weight",
    "interleaved experts": "attn_q. ffn_gate_exps.weight ffn_up_exps.weight ffn_down_exps.weight",
    "linear attention, experts": "ssm_out attn_qkv attn_gate ffn_up_exps ffn_gate_inp.weight",
    "groups of heads": "attn_qkv attn_output",
    "kinds of layers": "ssm_in attn_q. attn_k. ffn_up",
    "projections of several inputs": "token_embd per_layer_token_embd attn_q.",
}


def draw(file: Path, wanted: str) -> dict[str, np.ndarray[Any, Any]]:
    """lora_a and lora_b, of different ranks, for a model's tensors with one of these words."""
    rng, made = np.random.default_rng(1), {}
    for name, info in read_header(file).tensors.items():
        if len(info.shape) > 1 and any(word in name for word in wanted.split()):
            rank = int(rng.integers(2, 5))
            *experts, rows, columns = info.shape
            a, b = rng.standard_normal((*experts, rank, columns)), rng.standard_normal((rows, rank))
            b = np.broadcast_to(b, (*experts, rows, rank)) * 0.1
            halves = (b, a.T) if "token_embd" in name else (a, b)
            for end, half in zip("ab", halves, strict=True):
                made[f"{name}.lora_{end}"] = half.astype(np.float32)
    return made


def write_adapter(
    path: Path, architecture: str, tensors: Arrays, kind: str = "lora", **more: Any
) -> LoRARequest:
    writer = GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", more.get("alpha", ALPHA))
    if "tokens" in more:
        writer.add_array("adapter.alora.invocation_tokens", more["tokens"])
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return LoRARequest("one", 1, str(path))


def merge(file: Path, out: Path, tensors: Arrays, alpha: float = ALPHA) -> Path:
    """A copy of the model's file, in which B A is added to its tensors."""
    shutil.copy(file, out)
    for name, info in read_header(out).tensors.items():
        if f"{name}.lora_a" in tensors:
            a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
            rank = b.shape[-1]
            delta = (a @ b.T if "token_embd" in name else b @ a) * (alpha / rank if alpha else 1.0)
            np.memmap(out, np.float32, "r+", info.offset, info.shape)[...] += delta
    return out


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    """What an adapter in PEFT's format adds to each parameter."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    stacked = config["target_parameters"]
    found = {}
    for key, a in tensors.items():
        if "lora_A" in key:
            module, b = key.removesuffix(".lora_A.weight"), tensors[key.replace("lora_A", "lora_B")]
            depth = module.count(".base_layer")
            module = module.replace(".base_layer", "")
            wrapped = [name for name in stacked if name.rpartition(".")[0] == module]
            if wrapped:
                name = wrapped[len(wrapped) - 1 - depth]
                rank = config["rank_pattern"].get(name, config["r"])
                a = a.unflatten(0, (-1, rank))
                b = b.unflatten(1, (rank, -1)).permute(2, 0, 1)
                found[name] = b @ a
            else:
                assert a.shape[0] == config["rank_pattern"].get(module, config["r"])
                found[f"{module}.weight"] = b @ a
        elif "lora_embedding_A" in key:
            module, b = key.removesuffix(".lora_embedding_A"), tensors[key[:-1] + "B"]
            found[f"{module}.weight"] = (b @ a).T
    assert config["alpha_pattern"] == config["rank_pattern"] and config["lora_alpha"] == config["r"]
    return found


@pytest.mark.parametrize("name", tiered(ADAPTED, "mixture", "linear attention, experts"))
def test_a_parameter_gets_what_is_added_to_its_tensors(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    file = write_converted(tmp_path / "m.gguf", case, make_module(case))
    drawn = draw(file, ADAPTED[name])
    for word in ADAPTED[name].split():
        assert any(word in tensor for tensor in drawn), word
    adapter = write_adapter(tmp_path / "a.gguf", case.architecture, drawn)
    model = model_directory(file)
    found = deltas(Path(as_peft(adapter, model).lora_path))
    ranks = {half.shape[-1] for tensor, half in drawn.items() if tensor.endswith("b")}
    assert rank_of(tmp_path / "a.gguf") == max(ranks)
    merged = open_gguf(model_directory(merge(file, tmp_path / "merged.gguf", drawn)))
    for parameter, tensor in open_gguf(model).items():
        added = merged[parameter].read() - tensor.read()
        got = found.pop(parameter, torch.zeros(()))
        if isinstance(tensor, GgufTensor) and tensor.transposed and got.dim():
            got = got.mT
        torch.testing.assert_close(got.expand_as(added), added, atol=1e-5, rtol=1e-4)
        assert bool(added.any()) == bool(got.any())
    assert not found


@pytest.mark.parametrize("alpha", [ALPHA, 0.0])
def test_answers_are_those_of_the_merged_model(alpha: float, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "qwen3moe")
    drawn = draw(file, "attn_q. attn_v. attn_output ffn_down_exps output.weight")
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", drawn, alpha=alpha)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
    prompts = [{"prompt_token_ids": [5, 9, 30, 7]}, {"prompt_token_ids": [60, 3, 3]}]
    with LLM(str(merge(file, tmp_path / "merged.gguf", drawn, alpha)), opt_level=0) as merged:
        expected = merged.generate(prompts, params, progress=False)
    options: Any = {"enable_lora": True, "max_lora_expert_rank": 8, "opt_level": 0}
    with LLM(str(file), kv_cache_dtype="float32", activation_bits=32, **options) as llm:
        plain, *found = llm.generate(
            [prompts[0], *prompts], params, progress=False, lora_request=[None, adapter, adapter]
        )
    ids = [one.outputs[0].token_ids for one in found]
    assert ids == [one.outputs[0].token_ids for one in expected]
    assert plain.outputs[0].token_ids != ids[0], "the adapter changes the answer"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama")
    model = model_directory(file)
    drawn = draw(file, "blk.0.attn_q.")
    [a, b] = drawn
    wrong: list[tuple[str, LoRARequest]] = []

    def write(why: str, tensors: Arrays, architecture: str = "llama", **more: Any) -> None:
        path = tmp_path / f"{len(wrong)}.gguf"
        wrong.append((why, write_adapter(path, architecture, tensors, **more)))

    write("is for models of architecture 'qwen2'", drawn, "qwen2")
    write("adapter.type is 'other'", drawn, kind="other")
    write("adapter.lora.alpha nan", drawn, alpha=float("nan"))
    write("applies only after certain tokens", drawn, tokens=[1, 2])
    write("only one of lora_a and lora_b for 'blk.0.attn_q.weight'", {a: drawn[a]})
    write("has no tensors", {})
    write("which is not the lora_a", {**drawn, "blk.0.attn_norm.weight": np.ones(4, np.float32)})
    write(
        "adapts 'blk.7.attn_q.weight', which the model's file does not have",
        {name.replace("blk.0", "blk.7"): value for name, value in drawn.items()},
    )
    write("does not fit the model's tensor", {a: drawn[a][:, :8], b: drawn[b]})
    write("does not fit the model's tensor", {a: drawn[a], b: drawn[b][:, :1]})
    wrong.append(("more than it can contain", LoRARequest("cut", 1, str(tmp_path / "cut.gguf"))))
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "0.gguf").read_bytes()[:200])
    for why, adapter in wrong:
        with pytest.raises(InvalidRequestError, match=re.escape(why)):
            as_peft(adapter, model)
    good = write_adapter(tmp_path / "good.gguf", "llama", drawn)
    with pytest.raises(InvalidRequestError, match="the served model is not"):
        as_peft(good, tmp_path)
    assert as_peft(good, model) == as_peft(good, model)
    with pytest.raises(InvalidRequestError, match="has several GGUF files"):
        as_peft(LoRARequest("some", 1, str(tmp_path)), model)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(tmp_path / "good.gguf", alone / "adapter.gguf")
    assert deltas(Path(as_peft(LoRARequest("dir", 2, str(alone)), model).lora_path))
