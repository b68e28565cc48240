"""Adds the C++ versions to the registry, with the arguments that each of them supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from llmc.kernels.act_mul import act_mul, activate
from llmc.kernels.add_lora import add_lora
from llmc.kernels.ban_words import ban_words
from llmc.kernels.bmm import bmm
from llmc.kernels.cache_dtype import caches_fit
from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.choose_blocks import choose_blocks
from llmc.kernels.choose_experts import choose_experts, sum_experts
from llmc.kernels.choose_keys import choose_keys
from llmc.kernels.cpu.build import is_loaded
from llmc.kernels.cpu.levels import multiplies_integers
from llmc.kernels.decayed_softmax import decayed_softmax
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.fused_linear import fused_linear
from llmc.kernels.gated_rms_norm import gated_rms_norm
from llmc.kernels.latent_attention import latent_attention
from llmc.kernels.layer_norm import add_layer_norm, layer_norm
from llmc.kernels.linear import linear
from llmc.kernels.linear_recurrence import linear_recurrence
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.pool_windows import pool_windows
from llmc.kernels.prepare_step import prepare_step
from llmc.kernels.process_logits import process_logits
from llmc.kernels.quantized_embedding import quantized_embedding
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import EXACT_BITS, quantized_linear
from llmc.kernels.record_tokens import record_tokens
from llmc.kernels.registry import Fn, Impl, Op
from llmc.kernels.rms_norm import add_rms_norm, norm_add, norm_add_norm, rms_norm
from llmc.kernels.rope_write import rope_write
from llmc.kernels.rope_write_latent import rope_write_latent
from llmc.kernels.sample import sample
from llmc.kernels.sample_rows import sample_rows
from llmc.kernels.selective_scan import selective_scan
from llmc.kernels.token_logprobs import token_logprobs
from llmc.kernels.write_kv import write_kv
from llmc.kernels.write_segments import write_segments

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 1024
_MAX_TAPS = 16  # as in state.h


def _takes(*tensors: Tensor | None) -> bool:
    """Whether all are on the CPU, of one supported dtype, with contiguous last dimensions."""
    given = [t for t in tensors if t is not None]
    return all(
        t.device.type == "cpu"
        and t.dtype == given[0].dtype
        and t.dtype in _DTYPES
        and (t.shape[-1] == 1 or t.stride(-1) == 1)
        for t in given
    )


def _all_of(*names: str) -> Fn:
    """A check that the arguments with these names are supported; None is allowed."""
    return lambda **arguments: _takes(*(arguments[name] for name in names))


def _write_kv(
    *,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    **others: object,
) -> bool:
    return _takes(key, value) and caches_fit(key, key_cache, value_cache, k_scale, v_scale)


def _rope_write(*, cos_table: Tensor, sin_table: Tensor, **others: Any) -> bool:
    names = ("key_cache", "value_cache", "k_scale", "v_scale")
    return (
        _takes(*(others[name] for name in ("query", "key", "value", "query_norm", "key_norm")))
        and caches_fit(others["query"], *(others[name] for name in names))
        and cos_table.dtype == sin_table.dtype == torch.float32
        and cos_table.stride(-1) == sin_table.stride(-1) == 1
    )


def _rope_write_latent(*, cos_table: Tensor, sin_table: Tensor, **others: Any) -> bool:
    cache, k_scale = others["key_cache"], others["k_scale"]
    return (
        _takes(*(others[name] for name in ("query", "latent", "shared", "latent_norm")))
        and cache.dtype != torch.int8
        and caches_fit(others["query"], cache, cache, k_scale, k_scale)
        and cos_table.dtype == sin_table.dtype == torch.float32
        and cos_table.stride(-1) == sin_table.stride(-1) == 1
    )


def _paged_attention(
    *,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    chosen: Tensor | None,
    **others: Any,
) -> bool:
    fits = query.shape[2] <= _MAX_HEAD_DIM and value_cache.shape[3] <= _MAX_HEAD_DIM
    taken = fits and _takes(query) and _takes_chosen(chosen, {"key_cache": key_cache, **others})
    taken = taken and _takes(others["distance_bias"])
    return taken and caches_fit(query, key_cache, value_cache, k_scale, v_scale)


def _latent_attention(
    *, query: Tensor, weight: Tensor, key_cache: Tensor, k_scale: Tensor | None, **others: object
) -> bool:
    fits = max(query.shape[2], key_cache.shape[3]) <= _MAX_HEAD_DIM
    fits = fits and key_cache.dtype != torch.int8
    return (
        fits and _takes(query, weight) and caches_fit(query, key_cache, key_cache, k_scale, k_scale)
    )


def _takes_chosen(chosen: Tensor | None, others: Mapping[str, Any]) -> bool:
    biases = (others["slopes"], others["distance_bias"])
    plain = others["window"] == others["chunk"] == 0 and not any(b is not None for b in biases)
    plain = plain and others["key_cache"].dtype != torch.int8
    return chosen is None or (plain and chosen.dtype == torch.int32 and chosen.stride(-1) == 1)


def _choose_keys(
    *, query: Tensor, key: Tensor, weights: Tensor, key_cache: Tensor, **others: object
) -> bool:
    return _takes(query, key, key_cache) and _takes(weights) and weights.dtype == torch.float32


def _choose_blocks(*, query: Tensor, key: Tensor, key_cache: Tensor, **others: object) -> bool:
    return _takes(query, key, key_cache)


def _fused_linear(
    *, x: Tensor, norm_weight: Tensor | None, gate: Tensor | None, **others: Any
) -> bool:
    linear = [others[name] for name in ("weight", "bias", "residual")]
    if gate is None:
        return _takes(x, norm_weight, *linear)
    return all(_takes(t) for t in (x, gate, norm_weight)) and _takes(*linear)


def _bmm(*, self: Tensor, mat2: Tensor) -> bool:
    dense = mat2.stride(1) == 1 or mat2.stride(2) == 1
    return _takes(self) and mat2.dtype == self.dtype and mat2.device == self.device and dense


def _quantized_linear(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, x_bits: int, **others: object
) -> bool:
    is_float8 = weight.dtype == torch.float8_e4m3fn
    fits = x_bits == EXACT_BITS or is_float8 or multiplies_integers()
    return fits and _takes(x, bias) and weight.device.type == "cpu" and weight.is_contiguous()


def _choose_experts(
    *, logits: Tensor, dtype: torch.dtype, correction: Tensor | None, **others: object
) -> bool:
    dense = correction is None or correction.is_contiguous()
    return dense and _takes(logits) and _takes(correction) and dtype in _DTYPES


def _sum_experts(
    *, rows: Tensor, weight: Tensor, dtype: torch.dtype, residual: Tensor | None
) -> bool:
    same = residual is None or residual.dtype == dtype
    return same and dtype in _DTYPES and all(_takes(t) for t in (rows, weight, residual))


def _quantized_embedding(
    *, ids: Tensor, weight: Tensor, dtype: torch.dtype, **others: object
) -> bool:
    return (
        dtype in _DTYPES
        and ids.dtype == torch.int64
        and ids.device.type == weight.device.type == "cpu"
        and weight.is_contiguous()
    )


def _gated_rms_norm(
    *, x: Tensor, gate: Tensor, weight: Tensor | None, dtype: torch.dtype, **others: object
) -> bool:
    return dtype in _DTYPES and all(_takes(t) for t in (x, gate, weight))


def _on_cpu(**arguments: object) -> bool:
    return all(t.device.type == "cpu" for t in arguments.values() if isinstance(t, Tensor))


def _with_slots(
    *,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
    **inputs: Any,
) -> bool:
    """Whether an op with a state has its slots and request bounds, as in a step."""
    if state is None or query_start is None or context_len is None or request_row is None:
        return False
    return state.is_contiguous() and all(
        t.device.type == "cpu" and t.dtype in _DTYPES
        for t in (*inputs.values(), state)
        if isinstance(t, Tensor)
    )


def _pool_windows(*, series: int, **inputs: Tensor | None) -> bool:
    return series in (1, 2) and _with_slots(**inputs)


def _causal_conv(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, **others: Any
) -> bool:
    return (
        _with_slots(x=x, weight=weight, bias=bias, state=state, **others)
        and state is not None
        and weight.shape[1] <= _MAX_TAPS
        and x.dtype == weight.dtype == state.dtype == (x if bias is None else bias).dtype
    )


_SUPPORTS: tuple[tuple[Op, Fn], ...] = (
    (rms_norm, _all_of("x", "weight")),
    (add_rms_norm, _all_of("x", "residual", "weight")),
    (norm_add, _all_of("x", "residual", "weight")),
    (norm_add_norm, _all_of("x", "residual", "weight", "next_weight")),
    (layer_norm, _all_of("x", "weight", "bias")),
    (add_layer_norm, _all_of("x", "residual", "weight", "bias")),
    (act_mul, _all_of("gate_up")),
    (activate, _all_of("x")),
    (gated_rms_norm, _gated_rms_norm),
    (write_kv, _write_kv),
    (rope_write, _rope_write),
    (rope_write_latent, _rope_write_latent),
    (paged_attention, _paged_attention),
    (latent_attention, _latent_attention),
    (choose_keys, _choose_keys),
    (choose_blocks, _choose_blocks),
    (sample, _all_of("logits")),
    (sample_rows, _all_of("logits")),
    (process_logits, _all_of("logits")),
    (token_logprobs, _all_of("logits")),
    (linear, _all_of("x", "weight", "bias")),
    (bmm, _bmm),
    (expert_linear, _all_of("x", "weight", "bias")),
    (choose_experts, _choose_experts),
    (sum_experts, _sum_experts),
    (quantized_linear, _quantized_linear),
    (quantized_expert_linear, _quantized_linear),
    (quantized_embedding, _quantized_embedding),
    (fused_linear, _fused_linear),
    (add_lora, _all_of("out", "x", "a", "b")),
    (write_segments, _on_cpu),
    (prepare_step, _on_cpu),
    (record_tokens, _on_cpu),
    (ban_words, _on_cpu),
    (causal_conv, _causal_conv),
    (delta_rule, _with_slots),
    (selective_scan, _with_slots),
    (linear_recurrence, _with_slots),
    (decayed_softmax, _with_slots),
    (pool_windows, _pool_windows),
)


def _overload(name: str) -> Callable[[], Any]:
    return lambda: getattr(torch.ops.llmc_cpu, name).default


def declare_ops() -> None:
    """Declare schemas and shape functions of the library's ops; call once, after loading it."""
    for op, _ in _SUPPORTS:
        op.declare("llmc_cpu")


def register_impls() -> None:
    for op, supports in _SUPPORTS:
        op.impl(Impl(name="cpu", op=_overload(op.name), available=is_loaded, supports=supports))
