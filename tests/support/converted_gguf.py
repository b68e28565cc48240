"""Writes GGUF files of tiny models like llama.cpp's converter: names, layouts and metadata.

Checked against files that its convert_hf_to_gguf.py wrote for the same kinds of models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from tiny_gguf import FACTORS, add_words, random_superblocks
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

STACKED = "+"  # suffix of names of values that make up one tensor
# metadata -> the config's fields
KEYS = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon"),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size", "shared_intermediate_size",
    ),
    "leading_dense_block_count": ("num_dense_layers",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "shortconv.l_cache": ("conv_L_cache",),
    "use_parallel_residual": ("use_parallel_residual",),
    "ssm.conv_kernel": ("conv_kernel",),
    "ssm.state_size": ("state_size",),
    "ssm.group_count": ("n_groups",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """`name` is transformers'. `change` converts a parameter and its name to tensors.

    Of `metadata` None is left out. `named_as`: an architecture that the gguf package knows, with
    the same names of tensors.
    """

    architecture: str
    name: str
    fields: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[str, Tensor, Any], Mapping[str, Tensor]] = lambda name, value, _: {
        name: value
    }
    named_as: str = ""


def pairs(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Rotary halves are interleaved."""
    heads = {"q_proj.": config.num_attention_heads, "k_proj.": config.num_key_value_heads}
    for projection, count in heads.items():
        if projection in name:
            value = value.unflatten(0, (count, 2, -1)).swapaxes(1, 2).flatten(0, 2)
    return {name: value}


def pairs_and_shared(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """The gate and up matrices of the shared expert are joined."""
    if "input_linear" not in name:
        return pairs(name, value, config)
    gate, up = value.chunk(2)
    return {
        name.replace("input_linear", "gate"): gate,
        name.replace("input_linear", "up"): up,
    }


def norms(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    return {name: value + 1 if name.endswith("norm.weight") else value}


def by_kind(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """The queries of all heads, then their keys, then their values."""
    if "query_key_value" in name:
        groups = getattr(config, "num_kv_heads", config.num_attention_heads)
        size = config.hidden_size // config.num_attention_heads
        grouped = value.unflatten(0, (groups, -1, size))
        parts = (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])
        value = torch.cat([part.flatten(0, 2) for part in parts])
    return {name: value}


def scan(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    if name.endswith("A_log"):
        value = -value.exp()
    if "conv1d.weight" in name:
        value = value.squeeze(1)
    if value.dim() == 1 and name.endswith(("A_log", ".D")):
        value = value[:, None]
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        value = value.view(groups, -1)
    return {name.replace("dt_bias", "dt_proj.bias"): value}


def scan_or_attention(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """In dense models, the shared MLP of transformers is a plain MLP in the file."""
    if "_proj." in name or "shared_mlp" in name:
        found = pairs_and_shared(name, value, config)
        if config.num_local_experts:
            return found
        return {
            k.replace("shared_mlp.output_linear", "mlp.down_proj")
            .replace("shared_mlp.gate", "mlp.gate_proj")
            .replace("shared_mlp.up", "mlp.up_proj"): v
            for k, v in found.items()
        }
    return scan(name, value, config)


def multiplied(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Multipliers of inputs and outputs are folded into the weights."""
    before = config.attention_in_multiplier
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "q_proj": before,
        "k_proj": before * config.key_multiplier,
        "v_proj": before,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    short = name.split(".")[-2]
    if short == "in_proj":
        inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = (inner, inner, states, states, config.mamba_n_heads)
        rows = zip(value.split(sizes), config.ssm_multipliers, strict=True)
        value = torch.cat([part * factor for part, factor in rows]) * config.ssm_in_multiplier
    if short == "pre_ff_layernorm":  # the converter omits its suffix
        return {name.removesuffix(".weight"): value}
    return scan(name, value * factors.get(short, 1), config)


def latent(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """The keys and values of a latent are two tensors; the one of keys is transposed."""
    if "kv_b_proj" not in name:
        return {name: value}
    heads = value.unflatten(0, (config.num_attention_heads, -1))
    k, v = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
    return {name.replace("kv_b", "k_b"): k.mT, name.replace("kv_b", "v_b"): v}


def without_numbers(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """The numbers of an activation are stored in the metadata."""
    return {} if ".act_fn." in name else {name: value}


def states(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Linear attention: the queries of all heads, then keys, values and gates."""
    if name.endswith("in_proj_qkvz.weight"):
        groups, size = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // groups * config.linear_value_head_dim
        parts = value.unflatten(0, (groups, -1)).split((size, size, values, values), dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        start = name.removesuffix("qkvz.weight")
        return {f"{start}qkv.weight": torch.cat((q, k, v)), f"{start}z.weight": z}
    if name.endswith("norm.weight") and "linear_attn" not in name:
        value = value + 1
    if name.endswith("A_log"):
        value = -value.exp()
    if "conv1d.weight" in name:
        value = value.squeeze(1)
    return {name.replace("dt_bias", "dt_proj.bias"): value}


def states_by_number(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Value heads that share a key head are not adjacent."""
    groups, size = config.linear_num_key_heads, config.linear_value_head_dim
    count = config.linear_num_value_heads // groups
    keys = 2 * groups * config.linear_key_head_dim

    def spread(rows: Tensor, size: int) -> Tensor:
        return rows.unflatten(0, (groups, count, size)).swapaxes(0, 1).flatten(0, 2)

    if "in_proj_qkv" in name or "conv1d" in name:
        value = torch.cat((value[:keys], spread(value[keys:], size)))
    elif "in_proj_z" in name:
        value = spread(value, size)
    elif "in_proj_a" in name or "in_proj_b" in name or name.endswith(("A_log", "dt_bias")):
        value = spread(value, 1)
    elif "linear_attn.out_proj" in name:
        value = spread(value.mT, size).mT
    return states(name, value, config)


def interleaved(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Gate and up alternate, and matrices are transposed."""
    if "experts.down_proj_bias" in name:
        return {name.replace("_proj_bias", "_proj.bias"): value}
    if "gate_up_proj_bias" in name:
        start = name.removesuffix("gate_up_proj_bias")
        return {f"{start}gate_proj.bias": value[:, ::2], f"{start}up_proj.bias": value[:, 1::2]}
    if "experts.down_proj" in name:
        return {f"{name}.weight": value.mT}
    if "experts.gate_up_proj" in name:
        start = name.removesuffix("gate_up_proj")
        rows = value.mT
        return {f"{start}gate_proj.weight": rows[:, ::2], f"{start}up_proj.weight": rows[:, 1::2]}
    return {f"{name}.weight" if name.endswith("sinks") else name: value}


def of_backbone(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Checkpoints use a different prefix."""
    return {k.replace("model.", "backbone.", 1): v for k, v in scan(name, value, config).items()}


def stacked(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Projections of all inputs are one tensor. Layers with shared keys have unused tensors."""
    start, _, rest = name.partition("projections.")
    if rest and "altup" in start:
        return {f"{start}projections.weight{STACKED}": value}
    layer = re.search(r"layers\.(\d+)\.", name)
    own = config.num_hidden_layers - config.num_kv_shared_layers
    if layer is None or int(layer[1]) < own or ".q_" not in name:
        return {f"{name}.weight" if name.endswith("_scale") else name: value}
    unused = ("k_proj", "v_proj") if "q_proj" in name else ("k_norm",)
    others = (re.sub("q_proj|q_norm", kind, name) for kind in unused)
    return {name: value, **dict.fromkeys(others, value + 1)}


def make_module(case: Case) -> Any:
    """Random weights, the same each time."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[case.name](**case.fields)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.is_floating_point() and not name.endswith(("A_log", "dt_bias")):
                noise = torch.randn_like(value)
                value.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise)
            if name.endswith("tid2eid"):  # the experts of each token
                experts = range(config.num_local_experts)
                chosen = [
                    torch.tensor(experts).roll(i)[: value.shape[1]] for i in range(len(value))
                ]
                value.copy_(torch.stack(chosen))
    return module.eval()


def write_converted(
    path: Path,
    case: Case,
    module: nn.Module,
    types: Mapping[str, GGMLQuantizationType] = MappingProxyType({}),
    merges: Sequence[str] = (),
) -> Path:
    """`types` of matrices by the first pattern that their name matches; all others are float32.

    Matrices of a type that the gguf package does not write have random bits.
    """
    config: Any = module.config
    writer = GGUFWriter(path, case.architecture)
    metadata = dict(case.metadata)
    for key, names in KEYS.items():
        if key in metadata:
            continue
        value = next((v for n in names if (v := getattr(config, n, None)) is not None), None)
        if value is not None:
            metadata[key] = value
    rope = getattr(config, "rope_parameters", None) or {}
    for layers, key in (("full_attention", "freq_base"), ("sliding_attention", "freq_base_swa")):
        of_layers = rope.get(layers, rope if key == "freq_base" else {})
        if "rope_theta" in of_layers:
            metadata.setdefault(f"rope.{key}", of_layers["rope_theta"])
    for key, value in metadata.items():
        name = f"{case.architecture}.{key}"
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(name, value)
    for number in ("alpha_p", "alpha_n", "beta", "eps"):
        found = [v.item() for n, v in module.state_dict().items() if n.endswith(f"act_fn.{number}")]
        if found:
            writer.add_array(f"xielu.{number}", found)
    add_words(writer, config.vocab_size, merges)
    rng = np.random.default_rng(0)
    for name, value in _stored(case, module):
        numbers = np.ascontiguousarray(value.numpy())
        to = next((to for pattern, to in types.items() if re.search(pattern, name)), None)
        if to is None:
            writer.add_tensor(name, numbers)
        elif to in FACTORS:
            writer.add_tensor(name, random_superblocks(to, numbers.shape, rng), raw_dtype=to)
        else:
            writer.add_tensor(name, quantize(numbers, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(case: Case, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    known = case.named_as or case.architecture
    [arch] = [key for key, name in MODEL_ARCH_NAMES.items() if name == known]
    config: Any = module.config
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    together: dict[str, list[Tensor]] = {}
    for parameter, value in module.state_dict().items():
        if tied and parameter == "lm_head.weight":
            continue
        for name, part in case.change(parameter, value, config).items():
            if name.endswith(STACKED):
                together.setdefault(name.removesuffix(STACKED), []).append(part)
            else:
                yield from _named(names, name, part)
    for name, values in together.items():
        yield from _named(names, name, torch.stack(values))


def _named(names: Any, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor under its name in a file, where joined expert matrices are two tensors."""
    if name.startswith(("blk.", "rope_", "output_hc_")):  # already has it
        yield name, value
        return
    layer = next((word for word in name.split(".") if word.isdecimal()), None)
    if name.endswith("experts.gate_up_proj"):
        for kind, half in zip(("gate", "up"), value.chunk(2, dim=1), strict=True):
            yield f"blk.{layer}.ffn_{kind}_exps.weight", half
        return
    if ".experts." in name:
        word = next(w for w in ("gate", "up", "down") if f"{w}_proj" in name)
        yield f"blk.{layer}.ffn_{word}_exps.{'bias' if 'bias' in name else 'weight'}", value
        return
    known = {
        "router.weight": "ffn_gate_inp.weight",
        "shared_mlp.gate.weight": "ffn_gate_shexp.weight",
        "shared_mlp.up.weight": "ffn_up_shexp.weight",
        "expert_bias": "exp_probs_b.bias",
        "dt_proj.bias": "ssm_dt.bias",
        "e_score_correction_bias": "exp_probs_b.bias",
        "pre_ff_layernorm": "ffn_norm",
        "in_proj_qkv.weight": "attn_qkv.weight",
        "in_proj_z.weight": "attn_gate.weight",
    }
    for end, short in known.items():
        if name.endswith(end):
            yield f"blk.{layer}.{short}", value
            return
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    yield found, value
