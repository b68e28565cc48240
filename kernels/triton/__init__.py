"""Ops in Triton: the only place that imports triton. Importing this package lists them in `OPS`."""

from llmc.kernels.triton import (
    act_mul,
    add_lora,
    causal_conv,
    choose_blocks,
    choose_keys,
    decayed_softmax,
    delta_rule,
    expert_linear,
    fused_linear,
    linear_recurrence,
    norm,
    paged_attention,
    process_logits,
    quantized_embedding,
    quantized_expert_linear,
    quantized_linear,
    rope_write,
    sample,
    selective_scan,
    step_rows,
    token_logprobs,
    write_kv,
)
from llmc.kernels.triton.interpreter import repair

__all__ = [
    "act_mul",
    "add_lora",
    "causal_conv",
    "choose_blocks",
    "choose_keys",
    "decayed_softmax",
    "delta_rule",
    "expert_linear",
    "fused_linear",
    "linear_recurrence",
    "norm",
    "paged_attention",
    "process_logits",
    "quantized_embedding",
    "quantized_expert_linear",
    "quantized_linear",
    "rope_write",
    "sample",
    "selective_scan",
    "step_rows",
    "token_logprobs",
    "write_kv",
]

repair()
