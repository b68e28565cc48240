"""`causal_conv` in Triton: a program handles some channels of a request, tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.configs import STATE_CHANNELS, tokens_at_once
from llmc.kernels.triton.define import define
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.state import dense, silu, span, step_args, takes_slots

# the arguments of a recurrence's kernel, without a convolution in it
NO_CONVOLUTION = {"conv_weight": None, "conv_bias": None, "conv_state": None, "counter": None}
NO_TAPS = {"TAPS": 0, "TAPS_PAD": 0, "SILU": False}


@triton.jit
def inputs(x, past, i, c, x_token, kept, inside, PAST: tl.constexpr, gate=None, gate_token=0):
    """Input i of channel c of the request: from its tokens, or from the state if i < 0."""
    is_new = inside & (i >= 0)
    new = tl.load(x + i.to(tl.int64) * x_token + c, mask=is_new, other=0.0)
    if gate is not None:
        by = tl.load(gate + i.to(tl.int64) * gate_token + c, mask=is_new, other=0.0)
        new = (new.to(tl.float32) * by.to(tl.float32)).to(new.dtype)
    old = tl.load(past + c * PAST + PAST + i, mask=inside & (i < 0) & kept, other=0.0)
    return new.to(tl.float32) + old.to(tl.float32)


@triton.jit
def convolved(
    x, weight, bias, past, i, c, live, inside, x_token, kept,
    TAPS: tl.constexpr, SILU: tl.constexpr, gate=None, gate_token=0,
):  # fmt: skip
    """The outputs of tokens i of a request in channels c, in float32; i and c broadcast. `live` and
    `inside`: which channels, and which of both there are."""
    y = 0.0
    if bias is not None:
        y += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    for j in tl.static_range(TAPS):
        w = tl.load(weight + c * TAPS + j, mask=live, other=0.0).to(tl.float32)
        y += w * inputs(
            x, past, i - (TAPS - 1) + j, c, x_token, kept, inside, TAPS - 1, gate, gate_token
        )
    if SILU:
        y = silu(y)
    return y


@triton.jit
def convolved_token(
    x, weight, bias, past, i, c, live, x_token, kept, TAPS: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """The outputs of token i, for a recurrence: rounded as the convolution's own kernel does."""
    y = convolved(x, weight, bias, past, i, c, live, live, x_token, kept, TAPS, SILU)
    return y.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def keep_inputs(
    x, past, count, c, live, x_token, kept, TAPS: tl.constexpr, TAPS_PAD: tl.constexpr,
    gate=None, gate_token=0,
):  # fmt: skip
    """Store the last inputs of channels c as their state after the request's `count` tokens."""
    j = tl.arange(0, TAPS_PAD)[None, :]
    inside = (j < TAPS - 1) & live[:, None]
    last_inputs = inputs(
        x, past, count - (TAPS - 1) + j, c[:, None], x_token, kept, inside, TAPS - 1,
        gate, gate_token,
    )  # fmt: skip
    tl.debug_barrier()  # all threads of the program have read the state
    place = past + c[:, None] * (TAPS - 1) + j
    tl.store(place, last_inputs.to(past.dtype.element_ty), mask=inside)


@triton.jit
def causal_conv_kernel(
    x, weight, bias, x_gate, y_gate, state, out, query_start, context_len, request_row, x_token,
    x_gate_token, y_gate_token,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAPS_PAD: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_previous()
    first, last, slot, kept = span(query_start, context_len, request_row, tl.program_id(0))
    count = last - first
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < CHANNELS
    x += first.to(tl.int64) * x_token
    if x_gate is not None:
        x_gate += first.to(tl.int64) * x_gate_token
    if y_gate is not None:
        y_gate += first.to(tl.int64) * y_gate_token
    out += first.to(tl.int64) * CHANNELS
    past = state + slot * CHANNELS * (TAPS - 1)
    i = tl.arange(0, TOKENS)
    for begin in range(0, count, TOKENS):
        token = (begin + i)[:, None]
        inside = (token < count) & live[None, :]
        y = convolved(
            x, weight, bias, past, token, c[None, :], live[None, :], inside, x_token, kept,
            TAPS, SILU, x_gate, x_gate_token,
        )  # fmt: skip
        if y_gate is not None:
            at = y_gate + token.to(tl.int64) * y_gate_token + c[None, :]
            y *= tl.load(at, mask=inside, other=0.0).to(tl.float32)
        place = out + token.to(tl.int64) * CHANNELS + c[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=inside)
    keep_inputs(x, past, count, c, live, x_token, kept, TAPS, TAPS_PAD, x_gate, x_gate_token)


def plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None,
    x_gate: Tensor | None, y_gate: Tensor | None, state: Tensor, *step: Tensor,
) -> Plan[Tensor]:  # fmt: skip
    (channels, taps), requests = weight.shape, step[-1].shape[0]
    x = dense(x)
    x_gate, y_gate = (None if gate is None else dense(gate) for gate in (x_gate, y_gate))
    out = x.new_empty(x.shape)
    block = min(power_of_2(channels), STATE_CHANNELS)
    tokens = tokens_at_once(x.shape[0], requests)
    pdl = dependent_launch.applies_to(x.device)
    launch = Launch(
        kernel=causal_conv_kernel,
        grid=(requests, cdiv(channels, block)),
        args={
            "x": x, "weight": weight.contiguous(),
            "bias": None if bias is None else bias.contiguous(),
            "x_gate": x_gate, "y_gate": y_gate, "state": state, "out": out,
            **step_args(*step), "x_token": x.stride(0),
            "x_gate_token": 0 if x_gate is None else x_gate.stride(0),
            "y_gate_token": 0 if y_gate is None else y_gate.stride(0),
        },
        constants={
            "CHANNELS": channels, "TAPS": taps, "TAPS_PAD": power_of_2(taps - 1),
            "BLOCK": block, "TOKENS": tokens, "SILU": act == "silu", "PDL": pdl,
        },
        num_warps=1 if tokens == 1 else 4,
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


define(causal_conv, plan=plan, supports=takes_slots)
