"""Ops in Triton: the only place that imports triton. Importing this package lists them in `OPS`."""

from llmc.kernels.triton import (
    act_mul,
    expert_linear,
    fused_linear,
    norm,
    paged_attention,
    process_logits,
    quantized_linear,
    rope_write,
    sample,
    step_rows,
    token_logprobs,
    write_kv,
)
from llmc.kernels.triton.interpreter import repair

__all__ = [
    "act_mul",
    "expert_linear",
    "fused_linear",
    "norm",
    "paged_attention",
    "process_logits",
    "quantized_linear",
    "rope_write",
    "sample",
    "step_rows",
    "token_logprobs",
    "write_kv",
]

repair()
