"""Tiny models of older architectures in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from converted_cases import (
    LATENT,
    LATENT_YARN,
    LOCAL,
    MOE,
    OF_LATENT,
    OF_YARN,
    SCALES,
    SIZES,
    YARN,
)
from converted_gguf import Case, pairs
from converted_more import LARGER_BASE, delta, indexed, joined_heads, layer_of, plain
from torch import Tensor


def full_rank(name: str, value: Tensor, config: Any) -> Mapping[str, Tensor]:
    """Gates of linear attention are one matrix each, and decay rates are stored themselves."""
    short = name.split(".")[-2]
    block = f"blk.{layer_of(name)}." if ".layers." in name else ""
    if name.endswith("A_log"):
        return {f"{block}ssm_a": value.exp()[:, None]}
    if short == "g_proj":
        linear = config.layer_types[int(layer_of(name))] == "linear_attention"
        return {f"{block}{'ssm_g_a' if linear else 'attn_gate'}.weight": value}
    return {f"{block}ssm_f_a.weight": value} if short == "f_proj" else delta(name, value, config)


def connected(name: str, value: Tensor, config: Any) -> Mapping[str, Tensor]:
    """Hyper-connections, compressors and indexers, and experts by token, as 32-bit integers."""
    known = {
        "attn_hc.": "hc_attn_", "ffn_hc.": "hc_ffn_", "hc_head.hc_": "output_hc_",
        "compressor.indexer.q_b_proj": "indexer.attn_q_b",
        "compressor.indexer.scorer.weights_proj": "indexer.proj",
        "compressor.indexer.kv_proj": "indexer_compressor_kv",
        "compressor.indexer.gate_proj": "indexer_compressor_gate",
        "compressor.indexer.kv_norm": "indexer_compressor_norm",
        "compressor.indexer.position_bias": "indexer_compressor_ape",
        "compressor.kv_proj": "attn_compressor_kv", "compressor.gate_proj": "attn_compressor_gate",
        "compressor.kv_norm": "attn_compressor_norm",
        "compressor.position_bias": "attn_compressor_ape",
        "q_a_norm": "attn_q_a_norm", "self_attn.kv_proj": "attn_kv", "kv_norm": "attn_kv_a_norm",
        "o_a_proj": "attn_output_a", "o_b_proj": "attn_output_b", "sinks": "attn_sinks",
        "gate.tid2eid": "ffn_gate_tid2eid",
    }  # fmt: skip
    start = next((k for k in known if k in name), None)
    if start is None:
        return {name: value}
    end = name.split(start)[1].removesuffix("weight").removesuffix(".")
    block = f"blk.{layer_of(name)}." if ".layers." in name else ""
    value = value.int() if value.dtype == torch.long else value
    return {f"{block}{known[start]}{end}.weight": value}


def pairs_and_sinks(name: str, value: Tensor, config: Any) -> Mapping[str, Tensor]:
    """The gate and up matrices of the shared expert stay joined."""
    block = f"blk.{layer_of(name)}." if ".layers." in name else ""
    if name.endswith("sinks"):
        return {f"{block}attn_sinks.weight": value}
    if "input_linear" in name:
        return {f"{block}ffn_up_shexp.weight": value}
    return pairs(name, value, config)


def pairs_of_norms(name: str, value: Tensor, config: Any) -> Mapping[str, Tensor]:
    own = name.endswith(("query_layernorm.weight", "key_layernorm.weight"))
    return {name: value.view(2, -1).T.flatten()} if own else pairs(name, value, config)


SWA: dict[str, Any] = {
    **SIZES, **SCALES, "num_hidden_layers": 4, "sliding_window": 8,
    "layer_types": ["full_attention", *["sliding_attention"] * 3],
    "layer_rope_theta": [0, 20000.0, 20000.0, 20000.0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}  # fmt: skip
OF_SWA: dict[str, Any] = {
    "attention.sliding_window_pattern": [False, True, True, True],
    "attention.rope_pattern": [False, True, True, True], "rope.dimension_count": 16,
}  # fmt: skip
ALIKE: dict[str, Any] = {**SIZES, "num_key_value_heads": 4}  # as many heads of keys as of queries
OLDER = {
    "pairs": Case(architecture="internlm2", name="llama", fields=SIZES, change=pairs),
    "pairs, all heads with keys": Case(
        architecture="xverse", name="llama", fields=ALIKE,
        metadata={"rope.dimension_count": 16, "rope.freq_base": None}, change=pairs,
    ),
    "pairs, as many layers as have rotary positions": Case(
        architecture="baichuan", name="llama", fields={**ALIKE, "num_hidden_layers": 32},
        metadata={"rope.dimension_count": 16, "rope.freq_base": None}, change=pairs,
    ),
    "multipliers but that of scores": Case(
        architecture="minicpm", name="granite",
        fields={**SIZES, **SCALES, "attention_multiplier": 16**-0.5},
        metadata={"attention.scale": None}, change=pairs,
    ),
    "multipliers that are not stated": Case(
        architecture="minicpm", name="granite",
        fields={
            **SIZES, "hidden_size": 512, "embedding_multiplier": 12.0, "logits_scaling": 2.0,
            "attention_multiplier": 128**-0.5, "residual_multiplier": 1.4 * 2**-0.5,
        },
        metadata={
            "attention.scale": None, "embedding_scale": None, "residual_scale": None,
            "logit_scale": None, "rope.dimension_count": 128,
        },
        change=pairs,
    ),
    "all of a head turned": Case(
        architecture="orion", name="stablelm",
        fields={
            **ALIKE, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
            },
        },
        metadata={"rope.freq_base": None, "use_parallel_residual": None},
    ),
    "joined heads, twice the width": Case(
        architecture="qwen", named_as="qwen2", name="qwen2", fields=ALIKE,
        metadata={"feed_forward_length": 192, "rope.dimension_count": 16},
        change=joined_heads(plain),
    ),
    "biases of attention": Case(
        architecture="pangu-embedded", name="llama", fields={**SIZES, "attention_bias": True},
        metadata={
            "rope.dimension_count": 16, "attention.key_length": 16, "attention.value_length": 16,
        },
    ),
    "joined heads, groups of experts": Case(
        architecture="bailingmoe2", named_as="exaone-moe", name="glm4_moe",
        fields={
            **{k: v for k, v in MOE.items() if k != "num_experts"}, **SIZES, "head_dim": 16,
            "num_hidden_layers": 3, "n_routed_experts": 8, "n_shared_experts": 1,
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True,
            "first_k_dense_replace": 1,
        },
        metadata={
            "rope.dimension_count": 8,
            "attention.key_length": 16, "attention.value_length": 16, "expert_count": 8,
            "expert_group_count": 4, "expert_group_used_count": 2, "expert_shared_count": 1,
            "expert_shared_feed_forward_length": 32, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "expert_gating_func": 2, "leading_dense_block_count": 1,
        },
        change=joined_heads(plain),
    ),
    "some keys of a latent, halves apart": Case(
        architecture="deepseek32", named_as="glm-dsa", name="deepseek_v32",
        fields={
            **LATENT, "num_hidden_layers": 3, "q_lora_rank": 24, "index_topk": 8, "n_group": 4,
            "topk_group": 2, "index_n_heads": 4, "index_head_dim": 64,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        metadata={
            **OF_LATENT, **OF_YARN, "rope.scaling.yarn_log_multiplier": 0.1,
            "attention.q_lora_rank": 24, "attention.indexer.head_count": 4,
            "attention.indexer.key_length": 64, "attention.indexer.top_k": 8,
            "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_group_count": 4,
            "expert_group_used_count": 2, "expert_gating_func": 2,
        },
        change=indexed,
    ),
    "two rotary bases, one of them scaled": Case(
        architecture="mellum", named_as="qwen3moe", name="mellum",
        fields={
            **SIZES, **MOE, "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 8,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "rope_parameters": {
                "full_attention": {**YARN, "truncate": True},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
            },
        },
        metadata={
            "attention.sliding_window_pattern": [False, True, True, True],
            "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0, "rope.dimension_count": 32,
            "attention.value_length": 32,
        },
    ),
    "delta attention of full rank, or gated latent": Case(
        architecture="bailingmoe3", named_as="kimi-linear", name="bailing_hybrid",
        fields={
            **{k: v for k, v in LATENT.items() if k != "n_routed_experts"},
            "num_hidden_layers": 3, "num_local_experts": 8, "n_group": 4, "topk_group": 2,
            "head_dim": 16, "layer_group_size": 2, "pad_token_id": 0, "eos_token_id": 1,
            "n_shared_experts": 1, "kda_lower_bound": -4.0,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
        },
        metadata={
            **OF_LATENT, "attention.head_count_kv": [0, 1, 1], "kda.head_dim": 16,
            "kda.safe_gate": True, "kda.gate_lower_bound": -4.0, "ssm.conv_kernel": 4,
            "expert_count": 8, "expert_shared_count": 1, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "expert_gating_func": 2, "expert_group_count": 4,
            "expert_group_used_count": 2, "expert_shared_feed_forward_length": 32,
            "swiglu_clamp_exp": [0.0, 0.0, 0.0],
        },
        change=full_rank,
    ),
    "a window and compressed entries, hyper-connections": Case(
        architecture="deepseek4", named_as="deepseek2", name="deepseek_v4",
        fields={
            "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32,
            "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 24,
            "num_experts_per_tok": 2, "n_routed_experts": 8, "max_position_embeddings": 64,
            "layer_types": [
                "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "swiglu_limit": 0.5,
            "sliding_window": 8, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 4,
            "index_head_dim": 64, "index_topk": 2, "qk_rope_head_dim": 8, "hc_sinkhorn_iters": 3,
            "rope_scaling": {**YARN, "truncate": True}, "compress_rope_theta": 20000.0,
            "rope_theta": 10000.0,
        },
        metadata={
            "feed_forward_length": None, "expert_count": 8, "expert_used_count": 2,
            "expert_feed_forward_length": 32, "expert_shared_count": 1, "expert_weights_norm": True,
            "expert_weights_scale": 1.5, "expert_gating_func": 4, "swiglu_clamp_exp": [0.5] * 4,
            "attention.q_lora_rank": 24, "attention.output_lora_rank": 16,
            "attention.output_group_count": 2, "attention.compress_ratios": [0, 4, 128, 4],
            "attention.compress_rope_freq_base": 20000.0, "attention.indexer.head_count": 4,
            "attention.indexer.key_length": 64, "attention.indexer.top_k": 2,
            "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 3,
            "hyper_connection.epsilon": 1e-6, "hash_layer_count": 1, "nextn_predict_layers": 1,
            "rope.dimension_count": 8,
            "rope.freq_base": 10000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0, "attention.value_length": 32,
        },
        change=connected,
    ),
    "sinks, some layers without positions": Case(
        architecture="granite_swa", named_as="granite", name="granite_swa",
        fields={**SWA, "tie_word_embeddings": False}, metadata=OF_SWA, change=pairs_and_sinks,
    ),
    "sinks, some layers without positions, experts": Case(
        architecture="granite_swa", named_as="granitemoe", name="granitemoe_swa",
        fields={**SWA, **LOCAL, "shared_intermediate_size": 32},
        metadata={**OF_SWA, "expert_shared_feed_forward_length": 32}, change=pairs_and_sinks,
    ),
    "pairs, normalized after turning": Case(
        architecture="maincoder", name="hunyuan_v1_dense",
        fields={
            **SIZES, "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        metadata={"rope.dimension_count": 32, "attention.value_length": 32},
        change=pairs_of_norms,
    ),
    "biases by distance": Case(
        architecture="mpt", name="mpt",
        fields={
            "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 128,
            "attn_config": {"clip_qkv": 0.8}, "tie_word_embeddings": True,
        },
        metadata={
            "context_length": 64, "feed_forward_length": 256, "attention.clamp_kqv": 0.8,
            "attention.max_alibi_bias": 8.0,
        },
    ),
    "one loop over the layers": Case(
        architecture="nanbeige", named_as="llama", name="llama",
        fields={**SIZES, "head_dim": 32},
        metadata={"num_loops": 1, "rope.dimension_count": 32, "attention.value_length": 32},
        change=pairs,
    ),
    "text beside images, one theta": Case(
        architecture="paddleocr", name="llama", fields={**SIZES, "head_dim": 32},
        metadata={
            "rope.dimension_sections": [4, 6, 6, 0], "attention.value_length": 32,
            "rope.dimension_count": 32,
        },
    ),
    "text beside images, a larger base": Case(
        architecture="hunyuan_vl", name="hunyuan_v1_dense",
        fields={**SIZES, "head_dim": 16, "rope_parameters": LARGER_BASE},
        metadata={
            "rope.dimension_sections": [2, 2, 2, 2], "rope.scaling.alpha": 1000.0,
            "rope.scaling.type": "none", "rope.scaling.factor": 1.0,
        },
    ),
}  # fmt: skip
