"""`linear_recurrence` in Triton: a program scans some channels of a request, a tile at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.linear_recurrence import linear_recurrence
from llmc.kernels.triton.configs import STATE_CHANNELS, tokens_at_once
from llmc.kernels.triton.define import define
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.state import dense, span, step_args, takes_slots


@triton.jit
def then(decay, h, next_decay, next_h):
    """The composition of two consecutive steps h -> decay * h + x."""
    return decay * next_decay, h * next_decay + next_h


@triton.jit
def linear_recurrence_kernel(
    x, decay, state, out, query_start, context_len, request_row, x_token, decay_token,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    first, last, slot, kept = span(query_start, context_len, request_row, tl.program_id(0))
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = state + slot * CHANNELS + c
    h = tl.load(place, mask=(c < CHANNELS) & kept, other=0.0)
    i = tl.arange(0, TOKENS)
    for begin in range(0, last - first, TOKENS):
        token = (first.to(tl.int64) + begin + i)[:, None]
        live = (token < last) & (c < CHANNELS)[None, :]
        fed = tl.load(x + token * x_token + c[None, :], mask=live, other=0.0).to(tl.float32)
        g = tl.load(decay + token * decay_token + c[None, :], mask=live, other=1.0).to(tl.float32)
        if TOKENS > 1:
            g, fed = tl.associative_scan((g, fed), 0, then)
        y = g * h[None, :] + fed
        tl.store(out + token * CHANNELS + c[None, :], y.to(out.dtype.element_ty), mask=live)
        if TOKENS > 1:  # past the last token, h does not change
            h = tl.sum(tl.where(i[:, None] == TOKENS - 1, y, 0.0), axis=0)
        else:
            h = tl.reshape(y, (BLOCK,))
    tl.debug_barrier()  # all threads of the program have read the state
    tl.store(place, h, mask=c < CHANNELS)


def plan(x: Tensor, decay: Tensor, state: Tensor, *step: Tensor) -> Plan[Tensor]:
    channels, requests = state.shape[1], step[-1].shape[0]
    x, decay = dense(x), dense(decay)
    out = x.new_empty(x.shape)
    tokens = tokens_at_once(x.shape[0], requests)
    block = min(power_of_2(channels), STATE_CHANNELS)
    launch = Launch(
        kernel=linear_recurrence_kernel,
        grid=(requests, cdiv(channels, block)),
        args={
            "x": x, "decay": decay, "state": state, "out": out, **step_args(*step),
            "x_token": x.stride(0), "decay_token": decay.stride(0),
        },
        constants={
            "CHANNELS": channels, "BLOCK": block,
            "TOKENS": tokens,
        },
        num_warps=1 if tokens == 1 else 4,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


define(linear_recurrence, plan=plan, supports=takes_slots)
