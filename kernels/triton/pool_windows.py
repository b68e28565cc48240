"""`pool_windows` in Triton: a program handles some channels of a request, token by token.

The running sums stay in registers, including the previous window's for the first series.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.pool_windows import pool_windows
from llmc.kernels.triton.configs import STATE_CHANNELS
from llmc.kernels.triton.define import define
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.state import dense, span, step_args, takes_slots


@triton.jit
def load_sums(place, live, kept, CHANNELS: tl.constexpr):
    top = tl.load(place, mask=live & kept, other=-1e38)
    below = tl.load(place + CHANNELS, mask=live & kept, other=0.0)
    return top, below, tl.load(place + 2 * CHANNELS, mask=live & kept, other=0.0)


@triton.jit
def store_sums(place, live, top, below, above, CHANNELS: tl.constexpr):
    tl.store(place, top, mask=live)
    tl.store(place + CHANNELS, below, mask=live)
    tl.store(place + 2 * CHANNELS, above, mask=live)


@triton.jit
def with_token(value, gate, bias, live, top, below, above):
    v = tl.load(value, mask=live, other=0.0).to(tl.float32)
    x = tl.load(gate, mask=live, other=0.0).to(tl.float32)
    x += tl.load(bias, mask=live, other=0.0).to(tl.float32)
    most = tl.maximum(top, x)
    kept, own = tl.exp(top - most), tl.exp(x - most)
    return most, kept * below + own, kept * above + own * v


@triton.jit
def pool_windows_kernel(
    value, gate, bias, state, out, query_start, context_len, request_row,
    value_token, gate_token, bias_row,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, last, slot, kept = span(query_start, context_len, request_row, tl.program_id(0))
    before = tl.load(context_len + tl.program_id(0)) - (last - first)
    before = tl.where(before > 0, before, 0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < CHANNELS
    PART: tl.constexpr = 3 * CHANNELS
    own = (SERIES - 1) * CHANNELS + c  # channels of the last series
    place = state + slot * (2 * SERIES - 1) * PART + c
    top, below, above = load_sums(place + (2 * SERIES - 2) * PART, live, kept, CHANNELS)
    old_top, old_below, old_above = load_sums(place, live, kept, CHANNELS)
    new_top, new_below, new_above = old_top, old_below, old_above
    if SERIES == 2:
        new_top, new_below, new_above = load_sums(place + PART, live, kept, CHANNELS)
    for i in range(last - first):
        token = first.to(tl.int64) + i
        j = (before + i) % WIDTH
        begins = j == 0
        if SERIES == 2:
            old_top = tl.where(begins, new_top, old_top)
            old_below = tl.where(begins, new_below, old_below)
            old_above = tl.where(begins, new_above, old_above)
            new_top, new_below, new_above = with_token(
                value + token * value_token + c, gate + token * gate_token + c,
                bias + j * bias_row + c, live, tl.where(begins, -1e38, new_top),
                tl.where(begins, 0.0, new_below), tl.where(begins, 0.0, new_above),
            )  # fmt: skip
        top, below, above = with_token(
            value + token * value_token + own, gate + token * gate_token + own,
            bias + j * bias_row + own, live, tl.where(begins, -1e38, top),
            tl.where(begins, 0.0, below), tl.where(begins, 0.0, above),
        )  # fmt: skip
        y = above / below
        if SERIES == 2:
            most = tl.maximum(old_top, top)
            left, right = tl.exp(old_top - most), tl.exp(top - most)
            y = (left * old_above + right * above) / (left * old_below + right * below)
        y = tl.where(j == WIDTH - 1, y, 0.0)
        tl.store(out + token * CHANNELS + c, y.to(out.dtype.element_ty), mask=live)
    tl.debug_barrier()  # all threads of the program have read the state
    store_sums(place + (2 * SERIES - 2) * PART, live, top, below, above, CHANNELS)
    if SERIES == 2:
        store_sums(place, live, old_top, old_below, old_above, CHANNELS)
        store_sums(place + PART, live, new_top, new_below, new_above, CHANNELS)


def plan(
    value: Tensor, gate: Tensor, bias: Tensor, series: int, state: Tensor, *step: Tensor
) -> Plan[Tensor]:
    channels, requests = state.shape[3], step[-1].shape[0]
    value, gate, bias = (dense(x) for x in (value, gate, bias))
    out = value.new_empty(value.shape[0], channels)
    block = min(power_of_2(channels), STATE_CHANNELS)
    launch = Launch(
        kernel=pool_windows_kernel,
        grid=(requests, cdiv(channels, block)),
        args={
            "value": value, "gate": gate, "bias": bias, "state": state, "out": out,
            **step_args(*step),
            "value_token": value.stride(0), "gate_token": gate.stride(0),
            "bias_row": bias.stride(0),
        },
        constants={
            "CHANNELS": channels, "WIDTH": bias.shape[0], "SERIES": series, "BLOCK": block,
        },
        num_warps=1,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def _supports(*, series: int, **inputs: Any) -> bool:
    return series in (1, 2) and takes_slots(**inputs)


define(pool_windows, plan=plan, supports=_supports)
