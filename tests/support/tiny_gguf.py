"""Small GGUF files, written with the gguf package as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

WORDS = ["<unk>", "<s>", "</s>", *(chr(c) for c in range(0x21, 0x7F)), "\u0120", "\u010a"]
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "vocab_size": 128,
}
# architecture of the file -> (transformers' name, fields that make it small)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SIZES, "head_dim": 16}),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 32}),
    "qwen2moe": (
        "qwen2_moe",
        {
            **SIZES,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3moe": (
        "qwen3_moe",
        {
            **SIZES,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma2": ("gemma2", {**SIZES, "head_dim": 16, "sliding_window": 32}),
    "gemma3": ("gemma3", {**SIZES, "head_dim": 16, "sliding_window": 32}),
    "phi3": ("phi3", {**SIZES, "pad_token_id": 0}),
    "stablelm": ("stablelm", {**SIZES, "use_qkv_bias": True}),
    "starcoder2": ("starcoder2", SIZES),
    "falcon": (
        "falcon",
        {
            **SIZES,
            "num_key_value_heads": 1,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
        },
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 128},
    ),
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}),
    "nemotron": ("nemotron", {**SIZES, "head_dim": 16}),
    "mamba": (
        "mamba",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "vocab_size": 128,
            "time_step_rank": 4,
        },
    ),
}
Edit = Callable[[GGUFWriter], None]


def tiny_module(architecture: str) -> nn.Module:
    """Random weights, the same each time."""
    name, fields = ARCHITECTURES[architecture]
    config: Any = CONFIG_MAPPING[name]().get_text_config()
    config = type(config)(**fields)
    torch.manual_seed(0)
    module: nn.Module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return module.eval()


def write_gguf(
    path: Path,
    architecture: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    edit: Edit | None = None,
) -> Path:
    """Write a file with random tensors, matrices as `kind`. `edit` can add metadata."""
    module: Any = tiny_module(architecture)
    config = module.config.get_text_config()
    writer = GGUFWriter(path, architecture)
    for key, field in GGUF_CONFIG_MAPPING[ARCHITECTURES[architecture][0]].items():
        value = getattr(config, field, None) if isinstance(field, str) else None
        if field == "rope_theta":
            value = 10000.0
        if value is not None and "vocab" not in key:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{key}", value)
    for key, field in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ("attention.key_length", "head_dim"),
        ("context_length", "n_positions"),
    ):
        value = getattr(config, field, None)
        if value and f"{architecture}.{key}" not in writer.kv_data[0]:
            writer.add_uint32(f"{architecture}.{key}", value)
    if architecture in ("stablelm", "nemotron"):
        head = config.hidden_size // config.num_attention_heads
        factor = config.rope_parameters["partial_rotary_factor"]
        writer.add_uint32(f"{architecture}.rope.dimension_count", int(head * factor))
    add_words(writer, config.vocab_size)
    if edit is not None:
        edit(writer)
    rng = np.random.default_rng(0)
    for name, shape in stored_shapes(module, architecture):
        values = rng.standard_normal(shape).astype(np.float32) * 0.1
        if name.endswith("ssm_a"):
            values = -np.exp(values)
        packed = len(shape) > 1 and shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
        to = kind if packed and "conv" not in name else GGMLQuantizationType.F32
        drawn = random_superblocks(to, shape, rng) if to in FACTORS else quantize(values, to)
        writer.add_tensor(name, drawn, raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Types that the gguf package does not write, or of superblocks: (place in the block, number) of
# the factors with which random bits are about 0.1.
FACTORS = {
    GGMLQuantizationType.Q4_K: ((0, 4e-4), (2, 3e-3)),
    GGMLQuantizationType.Q5_K: ((0, 2e-4), (2, 3e-3)),
    GGMLQuantizationType.IQ4_XS: ((0, 3e-5),),
    GGMLQuantizationType.Q6_K: ((208, 1e-4),),
    GGMLQuantizationType.IQ4_NL: ((0, 1e-3),),
    GGMLQuantizationType.IQ3_S: ((0, 5e-4),),
    GGMLQuantizationType.IQ3_XXS: ((0, 5e-4),),
    GGMLQuantizationType.IQ2_XS: ((0, 1e-3),),
    GGMLQuantizationType.IQ2_S: ((0, 1e-3),),
    GGMLQuantizationType.IQ1_S: ((0, 1e-2),),
    GGMLQuantizationType.TQ2_0: ((64, 0.05),),
}


def random_superblocks(
    kind: GGMLQuantizationType, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), np.uint8)
    for place, number in FACTORS[kind]:
        blocks[..., place : place + 2] = np.array([number], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def widen_for(
    kind: GGMLQuantizationType, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give the matrices of an architecture whole superblocks, if `kind` has any."""
    if kind in FACTORS:
        sizes = {
            "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256,
            "head_dim": 64,
        }  # fmt: skip
        name, fields = ARCHITECTURES[architecture]
        known = {key: value for key, value in sizes.items() if key in fields}
        monkeypatch.setitem(ARCHITECTURES, architecture, (name, {**fields, **known}))


def add_words(writer: GGUFWriter, count: int = 128, merges: Sequence[str] = ()) -> None:
    """Add a byte-level tokenizer of `count` tokens: single bytes, what the merges make, and names
    that no text has. llama.cpp requires at least one merge."""
    words = [*WORDS, *(pair.replace(" ", "") for pair in merges)]
    words += [f"<{i}>" for i in range(count - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, *[1] * (len(words) - 3)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def stored_shapes(module: nn.Module, architecture: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes as in llama.cpp."""
    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    names = get_gguf_hf_weights_map(module, kind(config={}))
    state = module.state_dict()
    ties = getattr(module.config, "tie_word_embeddings", False)
    found = []
    for name, parameter in names.items():
        if parameter not in state or (name == "output.weight" and ties):
            continue
        shape = tuple(state[parameter].shape)
        if name.endswith(("_gate_exps", "_up_exps")):  # joined in the module
            shape = (shape[0], shape[1] // 2, shape[2])
        if "conv1d.weight" in name:
            shape = (shape[0], shape[2])
        if name.endswith("ffn_gate_inp_shexp.weight"):
            shape = shape[1:]
        if architecture == "gpt2" and name.endswith("weight") and name.startswith("blk"):
            shape = shape[::-1]
        found.append((f"{name}.weight" if name.endswith("_exps") else name, shape))
    return found
