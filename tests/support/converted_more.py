"""More tiny models of architectures in GGUF files, with their architecture-specific changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from converted_cases import (
    LATENT,
    LOCAL,
    MOE,
    OF_LATENT,
    SIZES,
    YARN,
)
from converted_gguf import Case, interleaved, latent, pairs
from torch import Tensor

Change = Callable[[str, Tensor, Any], Mapping[str, Tensor]]


def layer_of(name: str) -> str:
    return next(word for word in name.split(".") if word.isdecimal())


def beside(change: Change, **extra: Any) -> Change:
    """The file also has other tensors: rotary factors, layers for speculation."""
    added = {k.replace("__", "."): torch.tensor(v, dtype=torch.float32) for k, v in extra.items()}
    return lambda name, value, config: {
        **change(name, value, config),
        **(added if name.endswith(".norm.weight") else {}),
    }


def plain(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    return {name: value}


def bias_of_experts(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """A bias without its suffix."""
    own = name.endswith("e_score_correction_bias")
    return {f"blk.{layer_of(name)}.exp_probs_b" if own else name: value}


def gates_by_head(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    own = name.endswith("g_proj.weight")
    return {f"blk.{layer_of(name)}.attn_gate.weight" if own else name: value}


def joined_heads(change: Change) -> Change:
    """Queries, keys and values are one tensor."""
    found: dict[str, list[Tensor]] = {}

    def join(name: str, value: Tensor, config: Any) -> Mapping[str, Tensor]:
        if not any(f".{kind}_proj." in name for kind in "qkv"):
            return change(name, value, config)
        joined = f"blk.{layer_of(name)}.attn_qkv.{name.split('.')[-1]}"
        parts = found.setdefault(joined, [])
        parts += change(name, value, config).values()
        return {joined: torch.cat(found.pop(joined))} if len(parts) == 3 else {}

    return join


def joined_experts(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Gate and up matrices are one tensor, gates first."""
    alternate = config.model_type == "gpt_oss"  # in the model, and are transposed
    if not name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
        return interleaved(name, value, config) if alternate else {name: value}
    end = "bias" if name.endswith("bias") else "weight"
    if alternate:
        parts = interleaved(name, value, config).values()
        value = torch.cat(list(parts), dim=1)
    return {f"blk.{layer_of(name)}.ffn_gate_up_exps.{end}": value}


def turned_experts(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Gate rows come first, then up rows."""
    start = f"blk.{layer_of(name)}.ffn" if "experts." in name else ""
    if name.endswith("experts.gate_up_proj"):
        gate, up = value.mT.chunk(2, dim=1)
        return {f"{start}_gate_exps.weight": gate, f"{start}_up_exps.weight": up}
    return {f"{start}_down_exps.weight": value.mT} if start and "down" in name else {name: value}


def experts_in_rows(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Two-dimensional experts have three dimensions in files, and one kind is transposed."""
    kinds = {"w1": "gate", "v1": "up", "w2": "down"}
    kind = kinds.get(name.split(".")[-1])
    if kind is None:
        return {name: value}
    stacked = value.view(config.ffn_config.moe_num_experts, -1, config.d_model)
    stacked = stacked.mT if kind == "down" else stacked
    return {f"blk.{layer_of(name)}.ffn_{kind}_exps.weight": stacked}


def delta(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Linear attention: convolutions of queries, keys and values are tensors of four dimensions."""
    short = name.split(".")[-1]
    block = f"blk.{layer_of(name)}." if ".layers." in name else ""
    if "conv1d" in name:
        parts = value[None].transpose(1, 2).chunk(3, dim=2)
        kinds = zip("qkv", parts, strict=True)
        return {f"{block}ssm_conv1d_{k}.weight": part.transpose(1, 2) for k, part in kinds}
    if short == "A_log":
        return {f"{block}ssm_a": -value.exp()}
    if short == "dt_bias":
        return {f"{block}ssm_dt.bias": value}
    for kind in ("f_a", "f_b"):
        if f"{kind}_proj" in name:
            return {f"{block}ssm_{kind}.weight": value}
    return latent(name, value, config)


def scales(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """Routers have scales, layers too; gate and up matrices of experts are one tensor."""
    known = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "router.proj.weight": "ffn_gate_inp.weight",
        "layer_scalar": "layer_output_scale.weight",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    }
    short = next((k for end, k in known.items() if name.endswith(end)), None)
    return {f"blk.{layer_of(name)}.{short}" if short else name: value}


def sub_norms(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    short = next((k for k in ("attn_sub_norm", "ffn_sub_norm") if k in name), None)
    return {f"blk.{layer_of(name)}.{short}.weight" if short else name: value}


def llama3_factors(base: float, size: int, factor: float, length: int) -> list[float]:
    """Factors by wavelength: short ones stay, long ones are stretched, others are interpolated."""
    found = []
    for i in range(0, size, 2):
        wave = 2 * math.pi * base ** (i / size)
        share = min(1.0, max(0.0, (length / wave - 1) / 3))
        found.append(1 / ((1 - share) / factor + share))
    return found


LONG = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
SHORT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LLAMA3_FACTORS = llama3_factors(500000.0, 16, 16.0, 64)  # of its frequencies, in heads of 16
MSCALE = math.sqrt(1.5)  # 1 + log(64 / 16) / log(16)
LARGER_BASE = {
    "rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0,
}  # fmt: skip
CHUNKED: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 32,
    "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1,
}  # fmt: skip
OF_CHUNKED: dict[str, Any] = {
    "feed_forward_length": 96, "expert_feed_forward_length": 32, "interleave_moe_layer_step": 2,
    "leading_dense_block_count": None, "rope.dimension_count": 16,
}  # fmt: skip
TWO_SIZES: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip
OF_TWO_SIZES: dict[str, Any] = {
    "attention.key_length": 32, "attention.key_length_swa": 16, "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16, "rope.freq_base": 1e6, "rope.freq_base_swa": 20000.0,
    "attention.sliding_window_pattern": [True, False] * 2,
}  # fmt: skip


def indexed(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """A latent, and an indexer that picks the keys to attend to."""
    if ".indexer." not in name:
        return latent(name, value, config)
    known = {"wq_b": "attn_q_b", "wk": "attn_k", "weights_proj": "proj", "k_norm": "k_norm"}
    part, end = name.split(".")[-2:]
    return {f"blk.{layer_of(name)}.indexer.{known[part]}.{end}": value}


UNUSED = [1.0] * 4 + [1e30] * 12  # a quarter of the frequencies turns a head of 32
MORE = {
    "heads of two sizes": Case(
        architecture="gemma4", name="gemma4_text",
        fields={
            **TWO_SIZES, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        },
        metadata={
            **OF_TWO_SIZES, "attention.shared_kv_layers": 2, "attention.head_count_kv": 2,
            "embedding_length_per_layer_input": 8, "feed_forward_length": [96, 96, 192, 192],
        },
        change=beside(scales, rope_freqs__weight=UNUSED),
    ),
    "some keys of a latent": Case(
        architecture="glm-dsa", name="glm_moe_dsa",
        fields={
            **LATENT, "num_hidden_layers": 4, "q_lora_rank": 24, "index_topk": 8, "pad_token_id": 0,
            "index_n_heads": 4, "index_head_dim": 16, "routed_scaling_factor": 2.5,
            "indexer_types": ["full", "full", "shared", "full"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        metadata={
            **OF_LATENT, "attention.q_lora_rank": 24, "attention.indexer.head_count": 4,
            "attention.indexer.key_length": 16, "attention.indexer.top_k": 8,
            "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_group_count": 1,
            "expert_group_used_count": 1,
        },
        change=indexed,
    ),
    "factors of frequencies, halves apart": Case(
        architecture="exaone", name="llama",
        fields={
            **SIZES,
            "rope_parameters": LLAMA3,
        },
        metadata={"rope.dimension_count": 16},
        change=beside(plain, rope_freqs__weight=LLAMA3_FACTORS),
    ),
    "heads of two sizes, keys as values, experts": Case(
        architecture="gemma4", name="gemma4_text",
        fields={
            **TWO_SIZES, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 32,
        },
        metadata={
            **OF_TWO_SIZES, "attention.head_count_kv": [2, 1, 2, 1], "expert_used_count": 2,
            "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0,
        },
        change=beside(scales, rope_freqs__weight=UNUSED),
    ),
    "two factors of frequencies, experts": Case(
        architecture="phimoe", name="phimoe",
        fields={
            **SIZES, **LOCAL, "attention_bias": True, "lm_head_bias": True,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": LONG,
                "short_factor": SHORT, "original_max_position_embeddings": 16,
                "short_mscale": MSCALE, "long_mscale": MSCALE,
            },
        },
        metadata={
            "rope.scaling.type": "longrope", "rope.scaling.original_context_length": 16,
            "rope.scaling.attn_factor": MSCALE, "rope.dimension_count": 16,
            "attention.sliding_window": 0,
        },
        change=beside(
            plain, rope_factors_long__weight=LONG, rope_factors_short__weight=SHORT
        ),
    ),
    "latent, dense": Case(
        architecture="minicpm3", name="minicpm3",
        fields={
            **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": LONG[:4],
                "short_factor": SHORT[:4], "original_max_position_embeddings": 64,
            },
        },
        metadata={
            "attention.q_lora_rank": 24, "attention.kv_lora_rank": 32,
            "attention.key_length": 24, "rope.dimension_count": 8, "rope.freq_base": None,
        },
        change=beside(
            plain, rope_factors_long__weight=LONG[:4], rope_factors_short__weight=SHORT[:4]
        ),
    ),
    "chunks": Case(
        architecture="llama4", name="llama4_text",
        fields={
            **CHUNKED, "num_local_experts": 4,
            "rope_parameters": LLAMA3,
        },
        metadata=OF_CHUNKED,
        change=beside(
            turned_experts, rope_freqs__weight=LLAMA3_FACTORS
        ),
    ),
    "chunks, no norm of keys": Case(
        architecture="llama4", name="llama4_text",
        fields={
            **CHUNKED, "intermediate_size": 8, "num_local_experts": 128, "use_qk_norm": False,
        },
        metadata={**OF_CHUNKED, "expert_feed_forward_length": 8},
        change=turned_experts,
    ),
    "a larger base, experts": Case(
        architecture="hunyuan-moe", name="hunyuan_v1_moe",
        fields={
            **SIZES, "head_dim": 16, "num_experts": 4, "moe_topk": 2,
            "rope_parameters": LARGER_BASE,
        },
        metadata={
            "attention.key_length": None, "rope.freq_base": 10000.0 * 1000.0 ** (16 / 14),
            "rope.scaling.type": "none", "rope.scaling.factor": 1.0,
            "expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 96,
            "expert_shared_count": 1, "expert_used_count": 2,
        },
    ),
    "experts in rows": Case(
        architecture="dbrx", name="dbrx",
        fields={
            "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 500000.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        metadata={
            "feed_forward_length": 32, "attention.head_count_kv": 2, "attention.clamp_kqv": 0.8,
            "expert_count": 4, "expert_used_count": 2, "attention.layer_norm_epsilon": 1e-5,
        },
        change=experts_in_rows,
    ),
    "windows by layer, groups of experts": Case(
        architecture="exaone-moe", name="exaone_moe",
        fields={
            **SIZES, **MOE, "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 8,
            "n_group": 2, "topk_group": 1, "num_shared_experts": 2, "first_k_dense_replace": 1,
        },
        metadata={
            "block_count": 5, "nextn_predict_layers": 1, "expert_gating_func": 2,
            "attention.sliding_window_pattern": [True, True, True, False],
            "expert_group_count": 2, "expert_group_used_count": 1, "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 64, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "leading_dense_block_count": 1,
            "rope.scaling.type": "none",
        },
        change=beside(plain, blk__4__attn_norm__weight=LONG, blk__4__nextn__enorm__weight=LONG),
    ),
    "gates of attention": Case(
        architecture="afmoe", name="afmoe",
        fields={
            **SIZES, **MOE, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8,
            "num_dense_layers": 1, "num_shared_experts": 1, "route_scale": 2.5,
            "mup_enabled": True,
        },
        metadata={
            "expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
            "expert_gating_func": 2, "rope.dimension_count": 16,
        },
    ),
    "a softmax of the chosen experts": Case(
        architecture="cohere2moe", named_as="exaone-moe", name="cohere2_moe",
        fields={
            **SIZES, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 8, "num_experts": 4,
            "num_experts_per_tok": 2, "prefix_dense_intermediate_size": 48,
            "first_k_dense_replace": 1,
        },
        metadata={
            "attention.sliding_window_pattern": [False, True, True, True, False],
            "feed_forward_length": 48, "expert_feed_forward_length": 96, "expert_gating_func": 1,
            "expert_weights_norm": True, "leading_dense_block_count": 1,
            "rope.dimension_count": 16, "rope.scaling.type": "none",
        },
    ),
    "a sigmoid of the chosen experts, beside shared ones": Case(
        architecture="cohere2moe", named_as="exaone-moe", name="cohere2_moe",
        fields={
            **SIZES, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8, "num_experts": 4,
            "num_experts_per_tok": 2, "num_shared_experts": 2, "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False, "rms_norm_eps": 1e-5,
        },
        metadata={
            "attention.sliding_window_pattern": [True, True, True, False],
            "attention.layer_norm_epsilon": None, "feed_forward_length": None,
            "expert_feed_forward_length": 96, "expert_gating_func": 2, "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 192, "expert_weights_norm": False,
            "leading_dense_block_count": 0, "rope.dimension_count": 16,
            "rope.scaling.type": "none",
        },
    ),
    "shared experts of another width": Case(
        architecture="hy_v3", named_as="exaone-moe", name="hy_v3",
        fields={
            **SIZES, **MOE, "num_hidden_layers": 3, "head_dim": 24, "num_shared_experts": 2,
            "router_scaling_factor": 1.7,
        },
        metadata={
            "expert_shared_feed_forward_length": 64, "expert_weights_scale": 1.7,
            "expert_weights_norm": True, "expert_gating_func": 2,
        },
        change=bias_of_experts,
    ),
    "heads by layer, two rotary widths": Case(
        architecture="laguna", named_as="exaone-moe", name="laguna",
        fields={
            **SIZES, **MOE, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 8,
            "num_attention_heads_per_layer": [4, 6, 6, 6, 4, 6], "num_attention_heads": 6,
            "shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 2.5,
            "layer_types": [
                "sliding_attention" if i % 4 else "full_attention" for i in range(6)
            ],
            "rope_parameters": {
                "full_attention": {
                    **YARN, "truncate": True, "attention_factor": 1.0, "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {
                    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
                },
            },
        },
        metadata={
            "attention.head_count": [4, 6, 6, 6, 4, 6], "rope.dimension_count": 8,
            "rope.dimension_count_swa": 16, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "expert_gating_func": 2, "leading_dense_block_count": 1,
        },
        change=gates_by_head,
    ),
    "norms within": Case(
        architecture="bitnet", name="bitnet",
        fields={**SIZES, "hidden_act": "silu", "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        metadata={
            "rope.freq_base": None, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0,
        },
        change=sub_norms,
    ),
    "interleaved halves": Case(
        architecture="chatglm", name="glm",
        fields={**SIZES, "head_dim": 16, "pad_token_id": 0, "rms_norm_eps": 1e-5},
        metadata={"attention.key_length": None, "rope.dimension_count": 8},
    ),
    "interleaved halves, joined heads": Case(
        architecture="chatglm", name="glm",
        fields={**SIZES, "head_dim": 16, "pad_token_id": 0, "rms_norm_eps": 1e-5},
        metadata={"attention.key_length": None, "rope.dimension_count": 8},
        change=joined_heads(plain),
    ),
    "joined heads in pairs": Case(
        architecture="llama", name="llama", fields=SIZES, change=joined_heads(pairs)
    ),
    "no number of key heads": Case(
        architecture="llama", name="llama", fields={**SIZES, "num_key_value_heads": 4},
        metadata={"attention.head_count_kv": None}, change=pairs,
    ),
    "joined experts": Case(
        architecture="qwen3moe", name="qwen3_moe",
        fields={**SIZES, **MOE, "head_dim": 16, "norm_topk_prob": True}, change=joined_experts,
    ),
    "joined experts that alternate": Case(
        architecture="gpt-oss", name="gpt_oss",
        fields={
            **SIZES, **LOCAL, "intermediate_size": 64, "head_dim": 16, "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
        metadata={"rope.freq_base": 150000.0, "expert_feed_forward_length": 64},
        change=joined_experts,
    ),
    "delta attention or latent": Case(
        architecture="kimi-linear", name="kimi_linear",
        fields={
            **{
                k: v
                for k, v in LATENT.items()
                if k not in ("n_routed_experts", "first_k_dense_replace")
            },
            "num_hidden_layers": 3, "num_local_experts": 4, "n_shared_experts": 1,
            "linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "pad_token_id": 0,
            "mlp_layer_types": ["dense", "sparse", "sparse"], "routed_scaling_factor": 2.446,
        },
        metadata={
            **OF_LATENT, "attention.head_count_kv": [0, 1, 0], "kda.head_dim": 16,
            "ssm.conv_kernel": 4, "expert_count": 4, "expert_used_count": 2,
            "expert_shared_count": 1, "expert_feed_forward_length": 32,
            "expert_weights_scale": 2.446, "expert_gating_func": 2,
        },
        change=delta,
    ),
    "squares and biases": Case(
        architecture="jais2", name="jais2", fields={**SIZES, "num_key_value_heads": 4},
        metadata={"rope.dimension_count": 16},
    ),
    "more keys in a window": Case(
        architecture="mimo2", name="mimo_v2_flash",
        fields={
            **SIZES, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 24,
            "v_head_dim": 16, "sliding_window": 9, "attention_value_scale": 0.7,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "layer_types": [
                "full_attention", "sliding_attention", "sliding_attention", "full_attention",
            ],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 1 / 3}
                for kind, base in (("full_attention", 5e6), ("sliding_attention", 10000.0))
            },
        },
        metadata={
            "block_count": 7, "nextn_predict_layers": 3, "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [0, 1, 1, 0, 1, 1, 1],
            "attention.head_count_kv": [1, 2, 2, 1, 2, 2, 2], "attention.value_length": 16,
            "attention.value_scale": 0.7, "rope.dimension_count": 8, "rope.freq_base": 5e6,
            "rope.freq_base_swa": 10000.0, "expert_count": 4, "expert_group_count": 1,
            "expert_group_used_count": 1, "expert_gating_func": 2,
        },
        change=beside(
            plain, **{f"blk__{i}__attn_norm__weight": LONG for i in (4, 5, 6)}
        ),
    ),
}  # fmt: skip
