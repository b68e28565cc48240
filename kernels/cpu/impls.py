"""Lists the C++ versions in the registry: which arguments each of them takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmc.kernels.act_mul import act_mul
from llmc.kernels.ban_words import ban_words
from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.cpu.build import is_loaded
from llmc.kernels.decayed_softmax import decayed_softmax
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.fp8 import caches_fit
from llmc.kernels.fused_linear import fused_linear
from llmc.kernels.linear import linear
from llmc.kernels.linear_recurrence import linear_recurrence
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.prepare_step import prepare_step
from llmc.kernels.process_logits import process_logits
from llmc.kernels.quantized_linear import quantized_linear
from llmc.kernels.record_tokens import record_tokens
from llmc.kernels.registry import Fn, Impl, Op
from llmc.kernels.rms_norm import add_rms_norm, rms_norm
from llmc.kernels.rope_write import rope_write
from llmc.kernels.sample import sample
from llmc.kernels.selective_scan import selective_scan
from llmc.kernels.token_logprobs import token_logprobs
from llmc.kernels.write_kv import write_kv
from llmc.kernels.write_segments import write_segments

_DTYPES = (torch.float32, torch.bfloat16)
_MAX_HEAD_DIM = 1024
_MAX_TAPS = 16  # as in state.h


def _takes(*tensors: Tensor | None) -> bool:
    """All on the CPU, of one supported dtype, with dense last dimensions."""
    given = [t for t in tensors if t is not None]
    return all(
        t.device.type == "cpu"
        and t.dtype == given[0].dtype
        and t.dtype in _DTYPES
        and (t.shape[-1] == 1 or t.stride(-1) == 1)
        for t in given
    )


def _rms_norm(x: Tensor, weight: Tensor | None, *args: Any) -> bool:
    return _takes(x, weight)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, *args: Any) -> bool:
    return _takes(x, residual, weight)


def _act_mul(gate_up: Tensor, act: str) -> bool:
    return _takes(gate_up)


def _write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *scales: Tensor | None,
) -> bool:
    return _takes(key, value) and caches_fit(key, key_cache, value_cache, *scales)


def _rope_write(*args: Any) -> bool:
    query, key, value, query_norm, key_norm, _, _, cos, sin, _, _, *caches = args
    key_cache, value_cache, _, *scales = caches
    return (
        _takes(query, key, value, query_norm, key_norm)
        and caches_fit(query, key_cache, value_cache, *scales)
        and cos.dtype == sin.dtype == torch.float32
        and cos.stride(-1) == sin.stride(-1) == 1
    )


def _paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, *args: Any) -> bool:
    fits = query.shape[2] <= _MAX_HEAD_DIM and value_cache.shape[3] <= _MAX_HEAD_DIM
    return fits and _takes(query) and caches_fit(query, key_cache, value_cache, *args[9:11])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return _takes(x, weight, bias)


def _expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> bool:
    return _takes(x, weight, bias)


def _quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    minimum: Tensor | None = None,
) -> bool:
    return _takes(x, bias) and weight.device.type == "cpu" and weight.is_contiguous()


def _fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float | None,
    offset: float,
    act: str | None,
    residual: Tensor | None,
) -> bool:
    return _takes(x, weight, bias, norm_weight, residual)


def _logits(logits: Tensor, *args: Any) -> bool:
    return _takes(logits)


def _on_cpu(first: Tensor, *args: Any) -> bool:
    return first.device.type == "cpu"


def _with_slots(*args: Any) -> bool:
    """An op with a state: slots and bounds of the requests are its last four arguments."""
    *inputs, state, query_start, context_len, request_row = args
    return (
        all(t is not None for t in (state, query_start, context_len, request_row))
        and state.is_contiguous()
        and all(
            t.device.type == "cpu" and t.dtype in _DTYPES for t in (*inputs, state) if t is not None
        )
    )


def _causal_conv(*args: Any) -> bool:
    x, weight, bias, state = args[:4]
    return (
        _with_slots(*args)
        and weight.shape[1] <= _MAX_TAPS
        and x.dtype == weight.dtype == state.dtype == (x if bias is None else bias).dtype
    )


_SUPPORTS: tuple[tuple[Op, Fn], ...] = (
    (rms_norm, _rms_norm),
    (add_rms_norm, _add_rms_norm),
    (act_mul, _act_mul),
    (write_kv, _write_kv),
    (rope_write, _rope_write),
    (paged_attention, _paged_attention),
    (sample, _logits),
    (process_logits, _logits),
    (token_logprobs, _logits),
    (linear, _linear),
    (expert_linear, _expert_linear),
    (quantized_linear, _quantized_linear),
    (fused_linear, _fused_linear),
    (write_segments, _on_cpu),
    (prepare_step, _on_cpu),
    (record_tokens, _on_cpu),
    (ban_words, _on_cpu),
    (causal_conv, _causal_conv),
    (delta_rule, _with_slots),
    (selective_scan, _with_slots),
    (linear_recurrence, _with_slots),
    (decayed_softmax, _with_slots),
)


def _overload(name: str) -> Callable[[], Any]:
    return lambda: getattr(torch.ops.llmc_cpu, name).default


def register_impls() -> None:
    for op, supports in _SUPPORTS:
        op.impl(Impl(name="cpu", op=_overload(op.name), available=is_loaded, supports=supports))
