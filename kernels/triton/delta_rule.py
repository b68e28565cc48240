"""`delta_rule` in Triton: a program handles some columns of one head's state, token by token.

Prompts with one decay per head are processed in chunks (delta_chunks.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.causal_conv import NO_CONVOLUTION, NO_TAPS, convolved_token, keep_inputs
from llmc.kernels.triton.configs import DELTA_CHUNK, DELTA_ELEMENTS
from llmc.kernels.triton.counters import is_last
from llmc.kernels.triton.define import define, dot_precision
from llmc.kernels.triton.delta_chunks import delta_chunks_kernel, delta_units_kernel
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.state import dense, sigmoid, softplus, span, step_args, takes_slots


@triton.jit
def delta_rule_kernel(
    query, key, value, decay, beta, scale, norm_eps, decay_rate, decay_bias, beta_scale, state, out,
    conv_weight, conv_bias, conv_state, counter, query_start, context_len, request_row,
    query_token, query_head, key_token, key_head, value_token, value_head,
    decay_token, decay_head, beta_token, beta_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, NORMED: tl.constexpr, SIGMOID: tl.constexpr,
    BY_CHANNEL: tl.constexpr, TAPS: tl.constexpr, TAPS_PAD: tl.constexpr, SILU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """GROUP heads share a query and key. TAPS: those of a convolution before the rule, or 0; its
    inputs begin at `query`, and each program computes the outputs that it needs.

    The states of a query's and key's channels are read by all programs of the heads that share
    them. The last one to have read them writes them.
    """
    if PDL:
        wait_for_previous()
    request, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last, slot, kept = span(query_start, context_len, request_row, request)
    d = tl.arange(0, DIM_PAD)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = state + ((slot * HEADS + head) * DIM + d[:, None]) * V_DIM + v[None, :]
    inside = (d < DIM)[:, None] & (v < V_DIM)[None, :]
    memory = tl.load(tile, mask=inside & kept, other=0.0)
    KEYS: tl.constexpr = HEADS // GROUP
    if TAPS:
        CHANNELS: tl.constexpr = 2 * KEYS * DIM + HEADS * V_DIM
        inputs = query + first.to(tl.int64) * query_token
        past = conv_state + slot * CHANNELS * (TAPS - 1)
        q_channel = tl.program_id(1) // GROUP * DIM + d
        k_channel = KEYS * DIM + q_channel
        v_channel = 2 * KEYS * DIM + tl.program_id(1) * V_DIM + v
    else:
        query += head // GROUP * query_head
        key += head // GROUP * key_head
    for i in range(last - first):
        token = first.to(tl.int64) + i
        if TAPS:
            q = convolved_token(inputs, conv_weight, conv_bias, past, token - first, q_channel,
                                d < DIM, query_token, kept, TAPS, SILU)  # fmt: skip
            k = convolved_token(inputs, conv_weight, conv_bias, past, token - first, k_channel,
                                d < DIM, query_token, kept, TAPS, SILU)  # fmt: skip
        else:
            q = tl.load(query + token * query_token + d, mask=d < DIM, other=0.0).to(tl.float32)
            k = tl.load(key + token * key_token + d, mask=d < DIM, other=0.0).to(tl.float32)
        q_size, k_size = scale, 1.0  # multiply sums, so that vectors of the head stay as loaded
        if NORMED:
            q_size = scale / tl.sqrt(tl.sum(q * q, axis=0) + norm_eps)
            k_size = 1 / tl.sqrt(tl.sum(k * k, axis=0) + norm_eps)
        if TAPS:
            x = convolved_token(inputs, conv_weight, conv_bias, past, token - first, v_channel,
                                v < V_DIM, query_token, kept, TAPS, SILU)  # fmt: skip
        else:
            at = value + token * value_token + head * value_head
            x = tl.load(at + v, mask=v < V_DIM, other=0.0)
        b = tl.load(beta + token * beta_token + head * beta_head).to(tl.float32)
        if SIGMOID:
            b = beta_scale * sigmoid(b)
        at = decay + token * decay_token + head * decay_head
        if BY_CHANNEL:
            g = tl.load(at + d, mask=d < DIM, other=0.0).to(tl.float32)
            if decay_rate is not None:
                added = tl.load(decay_bias + head * DIM + d, mask=d < DIM, other=0.0)
                g = tl.load(decay_rate + head).to(tl.float32) * softplus(g + added.to(tl.float32))
            memory *= tl.exp(g)[:, None]
        else:
            g = tl.load(at).to(tl.float32)
            if decay_rate is not None:
                added = tl.load(decay_bias + head).to(tl.float32)
                g = tl.load(decay_rate + head).to(tl.float32) * softplus(g + added)
            memory *= tl.exp(g)
        known = k_size * tl.sum(memory * k[:, None], axis=0)
        memory += k[:, None] * ((x.to(tl.float32) - known) * (b * k_size))[None, :]
        y = q_size * tl.sum(memory * q[:, None], axis=0)
        place = out + (token * HEADS + head) * V_DIM + v
        tl.store(place, y.to(out.dtype.element_ty), mask=v < V_DIM)
    tl.debug_barrier()  # all threads of the program have read the state
    tl.store(tile, memory, mask=inside)
    if TAPS:
        count = last - first
        keep_inputs(inputs, past, count, v_channel, v < V_DIM, query_token, kept, TAPS, TAPS_PAD)
        readers = GROUP * ((V_DIM + BLOCK_V - 1) // BLOCK_V)
        if is_last(counter + request * KEYS + tl.program_id(1) // GROUP, readers):
            keep_inputs(inputs, past, count, q_channel, d < DIM, query_token, kept, TAPS, TAPS_PAD)
            keep_inputs(inputs, past, count, k_channel, d < DIM, query_token, kept, TAPS, TAPS_PAD)


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    norm_eps: float | None,
    decay_rate: Tensor | None,
    decay_bias: Tensor | None,
    beta_scale: float | None,
    state: Tensor,
    *step: Tensor,
) -> Plan[Tensor]:
    heads, dim, v_dim = state.shape[1:]
    query, key, value, decay = (dense(x) for x in (query, key, value, decay))
    rate, bias = (None if x is None else x.contiguous() for x in (decay_rate, decay_bias))
    out = value.new_empty(value.shape)
    requests = step[-1].shape[0]
    by_channel = decay.shape[2] > 1
    by_chunks = not by_channel and key.shape[0] >= DELTA_CHUNK // 2 * requests
    pdl = not by_chunks and dependent_launch.applies_to(value.device)
    prepared: tuple[Launch, ...] = ()
    options: dict[str, Any] = {}
    if by_chunks:
        (query, key), prepared = _units(query, key, scale, norm_eps)
        dim_pad = power_of_2(dim, 16)
        block_v = min(power_of_2(v_dim, 16), 32)
        more = {"CHUNK": DELTA_CHUNK, "PRECISION": dot_precision(value.dtype)}
    else:
        options = {"scale": scale, "norm_eps": norm_eps or 0.0}
        dim_pad = power_of_2(dim)
        block_v = min(power_of_2(v_dim), max(4, DELTA_ELEMENTS // dim_pad))
        options |= NO_CONVOLUTION
        more = {"NORMED": norm_eps is not None, "BY_CHANNEL": by_channel, "PDL": pdl, **NO_TAPS}
    named = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta}
    launch = Launch(
        kernel=delta_chunks_kernel if by_chunks else delta_rule_kernel,
        grid=(requests, heads, cdiv(v_dim, block_v)),
        args={
            **named, **options, "decay_rate": rate, "decay_bias": bias,
            "beta_scale": beta_scale or 0.0, "state": state, "out": out, **step_args(*step),
            **{f"{name}_token": x.stride(0) for name, x in named.items()},
            **{f"{name}_head": x.stride(1) for name, x in named.items()},
        },
        constants={
            "HEADS": heads, "GROUP": heads // key.shape[1], "DIM": dim, "DIM_PAD": dim_pad,
            "V_DIM": v_dim, "BLOCK_V": block_v, "SIGMOID": beta_scale is not None, **more,
        },
        num_warps=4 if by_chunks else 1,
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(*prepared, launch))


def _units(
    query: Tensor, key: Tensor, scale: float, norm_eps: float | None
) -> tuple[tuple[Tensor, Tensor], tuple[Launch, ...]]:
    """Query and key as the recurrence takes them, and the launch that computes them."""
    if norm_eps is None and scale == 1:
        return (query, key), ()
    tokens, heads, dim = key.shape
    queries, keys = (x.new_empty(x.shape, dtype=torch.float32) for x in (query, key))
    dim_pad = power_of_2(dim)
    block = max(1, DELTA_ELEMENTS // dim_pad)
    launch = Launch(
        kernel=delta_units_kernel,
        grid=(cdiv(tokens * heads, block),),
        args={
            "query": query, "key": key, "queries": queries, "keys": keys, "rows": tokens * heads,
            "scale": scale, "norm_eps": norm_eps or 0.0,
            "query_token": query.stride(0), "query_head": query.stride(1),
            "key_token": key.stride(0), "key_head": key.stride(1),
        },
        constants={
            "HEADS": heads, "DIM": dim, "DIM_PAD": dim_pad, "BLOCK": block,
            "NORMED": norm_eps is not None,
        },
    )  # fmt: skip
    return (queries, keys), (launch,)


define(delta_rule, plan=plan, supports=takes_slots)
