"""Ops in Triton: the only place that imports triton. Importing this package lists them in `OPS`."""

from llmc.kernels.triton import (
    act_mul,
    expert_linear,
    norm,
    paged_attention,
    process_logits,
    rope_write,
    sample,
    write_kv,
)
from llmc.kernels.triton.interpreter import repair

__all__ = [
    "act_mul",
    "expert_linear",
    "norm",
    "paged_attention",
    "process_logits",
    "rope_write",
    "sample",
    "write_kv",
]

repair()
