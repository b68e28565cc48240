"""Tiny models of architectures in GGUF files: fields, metadata, and the converter's changes."""

from __future__ import annotations

import math
from typing import Any

from converted_gguf import (
    Case,
    by_kind,
    interleaved,
    latent,
    multiplied,
    norms,
    of_backbone,
    pairs,
    pairs_and_shared,
    scan,
    scan_or_attention,
    stacked,
    states,
    states_by_number,
    without_numbers,
)

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "vocab_size": 128,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SCALES: dict[str, Any] = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3,
    "logits_scaling": 8.0,
}  # fmt: skip


YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16,
}  # fmt: skip
STATES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 16,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
OF_LATENT: dict[str, Any] = {
    "attention.head_count_kv": 1, "attention.kv_lora_rank": 32, "attention.key_length": 40,
    "attention.value_length": 32, "attention.key_length_mla": 24, "attention.value_length_mla": 12,
    "rope.dimension_count": 8, "expert_count": 8, "expert_shared_count": 2,
    "leading_dense_block_count": 1,
}  # fmt: skip
LATENT_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "original_max_position_embeddings": 16,
}  # fmt: skip
OF_YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.freq_base": 10000.0,
    "rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16,
}  # fmt: skip
OF_MAMBA: dict[str, Any] = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4,
    "ssm.group_count": 1,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
OF_LINEAR: dict[str, Any] = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4,
    "ssm.inner_size": 64, "rope.dimension_count": 16,
}  # fmt: skip
OF_KINDS: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 64, "intermediate_size": 96, "ssm_state_size": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16,
}  # fmt: skip
CASES = {
    "latent": Case(
        architecture="deepseek2", name="deepseek_v2",
        fields={
            **LATENT, "q_lora_rank": None, "n_group": 4, "topk_group": 2,
            "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
            "rope_parameters": {**LATENT_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        metadata={
            **OF_LATENT, **OF_YARN, "rope.scaling.yarn_log_multiplier": 0.0707,
            "expert_weights_scale": 16.0, "expert_group_count": 4, "expert_group_used_count": 2,
            "expert_gating_func": 1,
        },
        change=latent,
    ),
    "latent in one matrix": Case(
        architecture="deepseek2", name="deepseek_v2",
        fields={**LATENT, "q_lora_rank": 24},
        metadata={
            **{k: v for k, v in OF_LATENT.items() if "_mla" not in k},
            "attention.head_count_kv": 4, "attention.key_length": 24,
            "attention.value_length": 12, "attention.q_lora_rank": 24,
        },
    ),
    "latent, sigmoid of experts": Case(
        architecture="deepseek2", name="deepseek_v3",
        fields={
            **LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1,
            "rope_parameters": {**LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        metadata={
            **OF_LATENT, **OF_YARN, "rope.scaling.yarn_log_multiplier": 0.1,
            "attention.q_lora_rank": 24, "expert_weights_scale": 2.5, "expert_group_count": 2,
            "expert_group_used_count": 1, "expert_gating_func": 2, "expert_weights_norm": True,
        },
        change=latent,
    ),
    "activation by layer": Case(
        architecture="apertus", name="apertus",
        fields={**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        change=without_numbers,
    ),
    "experts from a layer on": Case(
        architecture="ernie4_5-moe", name="ernie4_5_moe",
        fields={
            **SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        },
        metadata={
            "expert_count": 4, "expert_used_count": 2, "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1, "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 48,
        },
    ),
    "multiplied": Case(
        architecture="falcon-h1", name="falcon_h1",
        fields={
            **SIZES, "head_dim": 32, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
            "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16,
            "mamba_rms_norm": True, "mamba_norm_before_gate": False, "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0, "mlp_multipliers": [0.8, 1.2], "key_multiplier": 0.7,
            "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.1,
            "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.75,
        },
        metadata={
            **OF_MAMBA, "ssm.inner_size": 64, "ssm.group_count": 2, "embedding_scale": None,
        },
        change=multiplied,
    ),
    "states or attention, experts": Case(
        architecture="granitehybrid", name="granitemoehybrid",
        fields={
            **SIZES, **SCALES, **LOCAL, **MAMBA, "shared_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
        metadata={
            **OF_MAMBA, "attention.head_count_kv": [0, 2], "rope.scaling.finetuned": False,
        },
        change=scan_or_attention,
    ),
    "states or attention": Case(
        architecture="granitehybrid", name="granitemoehybrid",
        fields={
            **SIZES, **SCALES, **MAMBA, "shared_intermediate_size": 96, "num_local_experts": 0,
            "num_experts_per_tok": 0, "layer_types": ["linear_attention", "full_attention"],
        },
        metadata={
            **OF_MAMBA, "attention.head_count_kv": [0, 2], "rope.scaling.finetuned": False,
        },
        change=scan_or_attention,
    ),
    "states, attention and experts by period": Case(
        architecture="jamba", name="jamba",
        fields={
            **SIZES, "num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 0, "num_experts": 4,
            "mamba_dt_rank": 4,
        },
        metadata={
            "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16,
            "ssm.time_step_rank": 4, "attention.head_count_kv": [0, 2, 0, 0, 2],
        },
        change=lambda name, value, _: {
            name: -value.exp() if name.endswith("A_log")
            else value.squeeze(1) if "conv1d.weight" in name else value
        },
    ),
    "queries by position": Case(
        architecture="mistral3", name="ministral3",
        fields={
            **SIZES, "head_dim": 16,
            "rope_parameters": {
                **LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
        metadata={
            **OF_YARN, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1,
        },
        change=pairs,
    ),
    "no window by default": Case(
        architecture="mistral3", name="mistral",
        fields={**SIZES, "head_dim": 32, "sliding_window": None}, change=pairs,
    ),
    "linear attention, joined": Case(
        architecture="qwen3next", name="qwen3_next",
        fields={**LINEAR, **MOE, "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
        metadata=OF_LINEAR, change=states,
    ),
    "linear attention": Case(
        architecture="qwen35", name="qwen3_5_text", fields=LINEAR, metadata=OF_LINEAR,
        change=states_by_number,
    ),
    "linear attention, experts": Case(
        architecture="qwen35moe", name="qwen3_5_moe_text",
        fields={**LINEAR, **MOE, "shared_expert_intermediate_size": 48},
        metadata=OF_LINEAR, change=states_by_number,
    ),
    "mixture": Case(
        architecture="llama", name="mixtral",
        fields={**SIZES, **LOCAL, "sliding_window": None}, change=pairs,
    ),
    "shared expert": Case(
        architecture="qwen2moe", name="qwen2_moe",
        fields={**SIZES, **MOE, "shared_expert_intermediate_size": 64},
    ),
    "one norm higher": Case(
        architecture="gemma", name="gemma", fields={**SIZES, "head_dim": 32}, change=norms
    ),
    "scale of queries": Case(
        architecture="gemma2", name="gemma2",
        fields={**SIZES, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32},
        change=norms,
    ),
    "two rotary bases": Case(
        architecture="gemma3", name="gemma3_text",
        fields={
            **SIZES, "num_hidden_layers": 7, "head_dim": 32, "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
        metadata={
            "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6,
            "rope.freq_base_swa": 20000.0,
        },
        change=norms,
    ),
    "projections of several inputs": Case(
        architecture="gemma3n", name="gemma3n_text",
        fields={
            **SIZES, "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 8,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
            "layer_types": [*["sliding_attention", "full_attention"] * 2],
        },
        metadata={
            "attention.sliding_window_pattern": [True, False, True, False],
            "attention.shared_kv_layers": 1, "embedding_length_per_layer_input": 8,
            "altup.active_idx": 0, "altup.num_inputs": 4, "rope.freq_base": 1e6,
            "rope.freq_base_swa": 10000.0, "feed_forward_length": [96] * 4,
            "activation_sparsity_scale": [1.2815516, *[-math.inf] * 3],
        },
        change=stacked,
    ),
    "no window": Case(
        architecture="phi3", name="phi3",
        fields={
            **SIZES, "pad_token_id": 0, "sliding_window": None,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            },
        },
        metadata={
            "attention.sliding_window": 0, "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "groups of heads": Case(
        architecture="falcon", name="falcon",
        fields={
            **SIZES, "num_kv_heads": 2, "parallel_attn": True, "bias": False, "alibi": False,
            "new_decoder_architecture": True,
        },
        change=by_kind,
    ),
    "groups of heads, one norm": Case(
        architecture="falcon", name="falcon",
        fields={
            **SIZES, "num_kv_heads": 2, "parallel_attn": True, "bias": False, "alibi": False,
            "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1,
        },
        change=by_kind,
    ),
    "joined heads": Case(
        architecture="gptneox", name="gpt_neox",
        fields={k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
        metadata={"rope.dimension_count": 4}, change=by_kind,
    ),
    "interleaved experts": Case(
        architecture="gpt-oss", name="gpt_oss",
        fields={
            **SIZES, **LOCAL, "intermediate_size": 64, "head_dim": 16, "sliding_window": 8,
            "rope_parameters": YARN,
        },
        metadata={
            "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.freq_base": 150000.0,
            "rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0, "expert_feed_forward_length": 64,
        },
        change=interleaved,
    ),
    "no scaling": Case(
        architecture="gpt-oss", name="gpt_oss",
        fields={
            **SIZES, **LOCAL, "intermediate_size": 64, "head_dim": 16, "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
        metadata={"rope.freq_base": 150000.0, "expert_feed_forward_length": 64},
        change=interleaved,
    ),
    "multipliers": Case(
        architecture="granite", name="granite", fields={**SIZES, **SCALES}, change=pairs
    ),
    "multipliers, experts": Case(
        architecture="granitemoe", name="granitemoeshared",
        fields={**SIZES, **SCALES, **LOCAL, "shared_intermediate_size": 32},
        change=pairs_and_shared,
    ),
    "logit scale": Case(architecture="command-r", name="cohere", fields=SIZES),
    "windows by layer": Case(
        architecture="cohere2", name="cohere2",
        fields={**SIZES, "num_hidden_layers": 4, "sliding_window": 8},
    ),
    "windows of a variant": Case(
        architecture="olmo2", name="olmo3",
        fields={**SIZES, "num_hidden_layers": 4, "sliding_window": 8},
        metadata={"attention.sliding_window_pattern": 4},
    ),
    "some layers attend": Case(
        architecture="lfm2moe", name="lfm2_moe",
        fields={
            **SIZES, **MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1,
        },
        metadata={"attention.head_count_kv": [0, 2]},
        change=lambda name, value, _: {
            name: value.squeeze(1) if "conv.conv.weight" in name else value
        },
    ),
    "some layers attend, dense": Case(
        architecture="lfm2", name="lfm2",
        fields={
            **SIZES, "layer_types": ["conv", "full_attention"], "norm_eps": 0.05,
            "block_auto_adjust_ff_dim": False,
        },
        metadata={"attention.head_count_kv": [0, 2]},
        change=lambda name, value, _: {
            name: value.squeeze(1) if "conv.conv.weight" in name else value
        },
    ),
    "some layers attend, no bias of experts": Case(
        architecture="lfm2moe", name="lfm2_moe",
        fields={
            **SIZES, **MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1,
            "use_expert_bias": False, "norm_eps": 0.05,
        },
        metadata={"attention.head_count_kv": [0, 2]},
        change=lambda name, value, _: {
            name: value.squeeze(1) if "conv.conv.weight" in name else value
        },
    ),
    "normalized states": Case(
        architecture="mamba", name="falcon_mamba",
        fields={**STATES, "intermediate_size": 128, "time_step_rank": 4},
        metadata={
            "ssm.dt_b_c_rms": True, "ssm.inner_size": 128, "ssm.time_step_rank": 4,
            "feed_forward_length": 0, "attention.head_count": 0,
        },
        change=scan,
    ),
    "states by head": Case(
        architecture="mamba2", name="mamba2",
        fields={**STATES, "expand": 2, "head_dim": 32, "num_heads": 4, "n_groups": 1},
        metadata={"ssm.inner_size": 128, "ssm.time_step_rank": 4, "feed_forward_length": 0},
        change=scan,
    ),
    "kinds of layers": Case(
        architecture="nemotron_h", name="nemotron_h",
        fields={
            **OF_KINDS, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        },
        metadata={
            **OF_MAMBA, "ssm.inner_size": 64, "ssm.group_count": 2, "block_count": 4,
            "attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 96, 0, 96],
            "expert_count": None, "expert_used_count": None,
        },
        change=of_backbone,
    ),
    "kinds of layers, experts": Case(
        architecture="nemotron_h_moe", name="nemotron_h",
        fields={
            **OF_KINDS, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 48,
            "moe_intermediate_size": 32, "routed_scaling_factor": 2.5,
        },
        metadata={
            **OF_MAMBA, "ssm.inner_size": 64, "ssm.group_count": 2, "block_count": 4,
            "attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 32, 0, 32],
            "expert_count": 4, "expert_shared_count": 1, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "expert_shared_feed_forward_length": 48,
        },
        change=of_backbone,
    ),
    "text beside images": Case(
        architecture="qwen3vl", name="qwen3", fields={**SIZES, "head_dim": 16},
        metadata={"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 1},
    ),
    "text beside images, experts": Case(
        architecture="qwen3vlmoe", name="qwen3_moe",
        fields={**SIZES, **MOE, "head_dim": 16, "norm_topk_prob": True},
        metadata={"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 1},
    ),
}  # fmt: skip
