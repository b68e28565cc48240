"""Shapes and dtypes of the C++ ops, for tracing: each output is dense and new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmc.kernels.quantized_linear import CHANNELS
from llmc.kernels.token_logprobs import fake as token_logprobs_fake


def _like_first(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


def _add_rms_norm(x: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _act_mul(gate_up: Tensor, act: str) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *args: object
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])


def _sample(logits: Tensor, *args: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _process_logits(logits: Tensor, *args: object) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _linear(x: Tensor, weight: Tensor, *args: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, transposed: bool
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2] if transposed else weight.shape[1])


def _nothing(*args: object) -> None:
    return None


def _quantized_linear(x: Tensor, weight: Tensor, *args: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] * CHANNELS)


def _fused_linear(x: Tensor, weight: Tensor, *args: object) -> Tensor:
    act = args[4]
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (1 if act is None else 2))


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, *args: object) -> Tensor:
    return value.new_empty(value.shape)


def _decayed_softmax(key: Tensor, value: Tensor, *args: object) -> Tensor:
    return value.new_empty(value.shape)


_FAKES: dict[str, Callable[..., Any]] = {
    "rms_norm": _like_first,
    "add_rms_norm": _add_rms_norm,
    "act_mul": _act_mul,
    "write_kv": _nothing,
    "rope_write": _like_first,
    "paged_attention": _paged_attention,
    "sample": _sample,
    "process_logits": _process_logits,
    "token_logprobs": token_logprobs_fake,
    "linear": _linear,
    "expert_linear": _expert_linear,
    "quantized_linear": _quantized_linear,
    "fused_linear": _fused_linear,
    "write_segments": _nothing,
    "prepare_step": _nothing,
    "record_tokens": _nothing,
    "ban_words": _nothing,
    "causal_conv": _like_first,
    "delta_rule": _delta_rule,
    "selective_scan": _like_first,
    "linear_recurrence": _like_first,
    "decayed_softmax": _decayed_softmax,
}


def register_fakes() -> None:
    """Once, right after the library is loaded."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"llmc_cpu::{name}", fake)
