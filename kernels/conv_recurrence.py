"""`conv_delta_rule`, `conv_scan`: a recurrent op together with the short convolution before it.

For GPUs: where each request has one token, one kernel computes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from llmc.kernels import delta_rule as delta_rules
from llmc.kernels import selective_scan as scans
from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.registry import Case, Fn, Op, op
from llmc.kernels.selective_scan import selective_scan
from llmc.kernels.state_cases import StateStep, step_cases
from llmc.kernels.torch_impl import torch_impl

Arguments = Callable[..., tuple[Any, ...]]


def delta_arguments(y: Tensor, groups: int, *rest: Any) -> tuple[Any, ...]:
    """Arguments of `delta_rule`, for the convolution's result y [T, 2 G D + H Dv]."""
    state = rest[-4]
    heads, dim, v_dim = state.shape[1:]
    query, key, value = y.split([groups * dim, groups * dim, heads * v_dim], dim=1)
    query, key = (part.unflatten(1, (groups, dim)) for part in (query, key))
    return query, key, value.unflatten(1, (heads, v_dim)), *rest


def scan_arguments(y: Tensor, groups: int, dt: Tensor, a: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Arguments of `selective_scan`, for the convolution's result y [T, H P + 2 G N]."""
    state = rest[-4]
    heads, width, size = state.shape[1:]
    x, b, c = y.split([heads * width, groups * size, groups * size], dim=1)
    b, c = (part.unflatten(1, (groups, size)) for part in (b, c))
    return x.unflatten(1, (heads, width)), dt, a, b, c, *rest


def _delta_shape(*, x: Tensor, state: Tensor, **others: object) -> Tensor:
    return x.new_empty(x.shape[0], state.shape[1], state.shape[3])


@op(mutates=("conv_state", "state"), shape=_delta_shape)
def conv_delta_rule(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_act: str | None,
    conv_state: Tensor,
    groups: int,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    norm_eps: float | None,
    decay_rate: Tensor | None,
    decay_bias: Tensor | None,
    beta_scale: float | None,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """x [T, 2 G D + H Dv] -> [T, H, Dv] in its dtype: `delta_rule` of `causal_conv` of x, whose
    channels are those of the queries and keys of G = `groups` heads, and of the values.

    conv_weight [2 G D + H Dv, K], and the other arguments as in both ops.
    """
    step = query_start, context_len, request_row
    y = causal_conv.reference(x, conv_weight, conv_bias, conv_act, None, None, conv_state, *step)
    rest = (decay, beta, scale, norm_eps, decay_rate, decay_bias, beta_scale, state, *step)
    made: Tensor = delta_rule.reference(*delta_arguments(y, groups, *rest))
    return made


def _scan_shape(*, x: Tensor, dtype: torch.dtype, state: Tensor, **others: object) -> Tensor:
    return x.new_empty(x.shape[0], state.shape[1], state.shape[2], dtype=dtype)


@op(mutates=("conv_state", "state"), shape=_scan_shape)
def conv_scan(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_act: str | None,
    conv_state: Tensor,
    groups: int,
    dt: Tensor,
    a: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    dtype: torch.dtype,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """x [T, H P + 2 G N] -> [T, H, P] in `dtype`: `selective_scan` of `causal_conv` of x, whose
    channels are those of the scan's x, and of b and c for G = `groups` groups of heads.

    conv_weight [H P + 2 G N, K], and the other arguments as in both ops.
    """
    step = query_start, context_len, request_row
    y = causal_conv.reference(x, conv_weight, conv_bias, conv_act, None, None, conv_state, *step)
    rest = (dt, a, skip, gate, dt_bias, dt_softplus, dt_min, dt_max, dtype, state, *step)
    made: Tensor = selective_scan.reference(*scan_arguments(y, groups, *rest))
    return made


def in_turn(recurrence: Op, arguments: Arguments, *prefer: str) -> Fn:
    """One op after the other, each in the first version of `prefer` that supports it."""

    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        act: str | None,
        state: Tensor,
        groups: int,
        *rest: Any,
    ) -> Tensor:
        taken = (x, weight, bias, act, None, None, state, *rest[-3:])
        y = causal_conv.run(*taken, prefer=prefer)
        made: Tensor = recurrence.run(*arguments(y, groups, *rest), prefer=prefer)
        return made

    return run


# In torch alone: while a step is recorded on a CPU, C++ kernels called from an op would be replayed
# besides the op itself, and change the state twice.
torch_impl(conv_delta_rule)(in_turn(delta_rule, delta_arguments, "torch"))
torch_impl(conv_scan)(in_turn(selective_scan, scan_arguments, "torch"))


def _with_convolution(
    parts: tuple[Tensor, ...], taps: int, state: Tensor, gen: torch.Generator
) -> tuple[Tensor | str | None, ...]:
    """x, weight, bias, act and state of a convolution, with the values of `parts` as its x.

    Slots of fresh requests hold NaN, as in `state`.
    """
    x = torch.cat([part.flatten(1) for part in parts], dim=1)
    channels = x.shape[1]

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(x.device, x.dtype)

    past = rand(state.shape[0], channels, taps - 1)
    past[state.flatten(1).isnan().any(1)] = float("nan")
    wide = torch.cat((x, rand(*x.shape)), dim=1)  # as from a merged projection
    bias, act = (rand(channels), None) if taps % 2 else (None, "silu")
    return wide[:, :channels], rand(channels, taps), bias, act, past


def make_delta_case(
    step: StateStep,
    gen: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    dim: int,
    v_dim: int,
    per_channel: bool,
    group: int,
    taps: int,
) -> Case:
    """`group` heads share a query and key."""
    case = delta_rules.make_case(step, gen, dtype, heads, dim, v_dim, per_channel, group, raw=True)
    return *_with_convolution(case[:3], taps, case[10], gen), heads // group, *case[3:]


def make_scan_case(
    step: StateStep,
    gen: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    width: int,
    groups: int,
    size: int,
    per_state: bool,
    taps: int,
) -> Case:
    case = scans.make_case(step, gen, dtype, heads, width, groups, size, per_state, raw=True)
    x, dt, a, b, c, *rest = case
    return *_with_convolution((x, b, c), taps, rest[7], gen), groups, dt, a, *rest


@conv_delta_rule.cases
def _delta_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for sizes in ((4, 16, 8, False, 2, 4), (2, 5, 6, True, 1, 3), (6, 32, 40, False, 3, 2)):
            yield make_delta_case(step, gen, dtype, *sizes)


@conv_scan.cases
def _scan_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for sizes in ((4, 8, 2, 16, False, 4), (6, 1, 1, 5, True, 3), (3, 6, 3, 5, False, 2)):
            yield make_scan_case(step, gen, dtype, *sizes)
