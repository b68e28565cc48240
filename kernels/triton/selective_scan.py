"""`selective_scan` in Triton: a program handles some rows of the state of one group of heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.selective_scan import selective_scan
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.causal_conv import NO_CONVOLUTION, NO_TAPS, convolved_token, keep_inputs
from llmc.kernels.triton.configs import SCAN_ELEMENTS
from llmc.kernels.triton.counters import is_last
from llmc.kernels.triton.define import define
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.state import dense, silu, softplus, span, step_args, takes_slots


@triton.jit
def selective_scan_kernel(
    x, dt, a, b, c, skip, gate, dt_bias, dt_min, dt_max, state, out,
    conv_weight, conv_bias, conv_state, counter, query_start, context_len, request_row,
    x_token, x_head, dt_token, dt_head, b_token, b_group, c_token, c_group, gate_token, gate_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUP_ROWS: tl.constexpr, SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr, BLOCK: tl.constexpr, BY_STATE: tl.constexpr,
    SOFTPLUS: tl.constexpr, TAPS: tl.constexpr, TAPS_PAD: tl.constexpr, SILU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The state has HEADS * WIDTH rows of SIZE values each. TAPS: those of a convolution before the
    scan, or 0, as in `delta_rule_kernel`; its inputs begin at `x`."""
    if PDL:
        wait_for_previous()
    request, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last, slot, kept = span(query_start, context_len, request_row, request)
    of_group = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live = of_group < GROUP_ROWS
    row = group * GROUP_ROWS + of_group
    head, p = row // WIDTH, row % WIDTH
    n = tl.arange(0, SIZE_PAD)
    tile = state + (slot * HEADS * WIDTH + row[:, None]) * SIZE + n[None, :]
    inside = live[:, None] & (n < SIZE)[None, :]
    memory = tl.load(tile, mask=inside & kept, other=0.0)
    if BY_STATE:
        rate = tl.load(a + head[:, None] * SIZE + n[None, :], mask=inside, other=0.0)
    else:
        rate = tl.load(a + head, mask=live, other=0.0)[:, None]
    rate = rate.to(tl.float32)
    if dt_bias is not None:
        added = tl.load(dt_bias + head, mask=live, other=0.0).to(tl.float32)
    if skip is not None:
        passed = tl.load(skip + head, mask=live, other=0.0).to(tl.float32)
    if TAPS:
        ROWS: tl.constexpr = HEADS * WIDTH
        GROUPS: tl.constexpr = ROWS // GROUP_ROWS
        inputs = x + first.to(tl.int64) * x_token
        past = conv_state + slot * (ROWS + 2 * GROUPS * SIZE) * (TAPS - 1)
        channel = tl.program_id(1) * GROUP_ROWS + of_group
        b_channel = ROWS + tl.program_id(1) * SIZE + n
        c_channel = b_channel + GROUPS * SIZE
    for i in range(last - first):
        token = first.to(tl.int64) + i
        size = tl.load(dt + token * dt_token + head * dt_head, mask=live, other=0.0).to(tl.float32)
        if dt_bias is not None:
            size += added
        if SOFTPLUS:
            size = softplus(size)
        size = tl.minimum(tl.maximum(size, dt_min), dt_max)
        if TAPS:
            fed = convolved_token(inputs, conv_weight, conv_bias, past, token - first, channel,
                                  live, x_token, kept, TAPS, SILU)  # fmt: skip
            into = convolved_token(inputs, conv_weight, conv_bias, past, token - first, b_channel,
                                   n < SIZE, x_token, kept, TAPS, SILU)  # fmt: skip
            read = convolved_token(inputs, conv_weight, conv_bias, past, token - first, c_channel,
                                   n < SIZE, x_token, kept, TAPS, SILU)  # fmt: skip
        else:
            fed = tl.load(x + token * x_token + head * x_head + p, mask=live, other=0.0)
            fed = fed.to(tl.float32)
            into = tl.load(b + token * b_token + group * b_group + n, mask=n < SIZE, other=0.0)
            read = tl.load(c + token * c_token + group * c_group + n, mask=n < SIZE, other=0.0)
        memory *= tl.exp(size[:, None] * rate)
        memory += (size * fed)[:, None] * into.to(tl.float32)[None, :]
        y = tl.sum(memory * read.to(tl.float32)[None, :], axis=1)
        if skip is not None:
            y += passed * fed
        if gate is not None:
            at = gate + token * gate_token + head * gate_head + p
            y *= silu(tl.load(at, mask=live, other=0.0).to(tl.float32))
        tl.store(out + token * HEADS * WIDTH + row, y.to(out.dtype.element_ty), mask=live)
    tl.debug_barrier()  # all threads of the program have read the state
    tl.store(tile, memory, mask=inside)
    if TAPS:
        count = last - first
        keep_inputs(inputs, past, count, channel, live, x_token, kept, TAPS, TAPS_PAD)
        if is_last(counter + request * GROUPS + tl.program_id(1), tl.num_programs(2)):
            keep_inputs(inputs, past, count, b_channel, n < SIZE, x_token, kept, TAPS, TAPS_PAD)
            keep_inputs(inputs, past, count, c_channel, n < SIZE, x_token, kept, TAPS, TAPS_PAD)


def plan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    dtype: torch.dtype,
    state: Tensor,
    *step: Tensor,
) -> Plan[Tensor]:
    heads, width, size = state.shape[1:]
    groups = b.shape[1]
    x, a, b, c = dense(x), a.contiguous(), dense(b), dense(c)
    skip, dt_bias = (None if n is None else n.contiguous() for n in (skip, dt_bias))
    gate = None if gate is None else dense(gate)
    out = x.new_empty(x.shape, dtype=dtype)
    rows, size_pad = heads // groups * width, power_of_2(size)
    block = min(power_of_2(rows), max(1, SCAN_ELEMENTS // size_pad))
    pdl = dependent_launch.applies_to(x.device)
    launch = Launch(
        kernel=selective_scan_kernel,
        grid=(step[-1].shape[0], groups, cdiv(rows, block)),
        args={
            "x": x, "dt": dt, "a": a, "b": b, "c": c, "skip": skip, "gate": gate,
            "dt_bias": dt_bias, "dt_min": dt_min, "dt_max": dt_max, "state": state, "out": out,
            **NO_CONVOLUTION, **step_args(*step),
            "x_token": x.stride(0), "x_head": x.stride(1),
            "dt_token": dt.stride(0), "dt_head": dt.stride(1),
            "b_token": b.stride(0), "b_group": b.stride(1),
            "c_token": c.stride(0), "c_group": c.stride(1),
            "gate_token": 0 if gate is None else gate.stride(0),
            "gate_head": 0 if gate is None else gate.stride(1),
        },
        constants={
            "HEADS": heads, "WIDTH": width, "GROUP_ROWS": rows, "SIZE": size,
            "SIZE_PAD": size_pad, "BLOCK": block, "BY_STATE": a.shape[1] > 1,
            "SOFTPLUS": dt_softplus, "PDL": pdl, **NO_TAPS,
        },
        num_warps=1,
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


define(selective_scan, plan=plan, supports=takes_slots)
