"""`conv_delta_rule` and `conv_scan` in Triton: for one token per request, one kernel.

A program of the recurrence computes the convolution's outputs of the channels that it reads. Some
are also read by other programs; of these channels, the last program to arrive writes the state of
the convolution, when all have read it. Steps with more tokens launch the convolution on its own:
its outputs would be computed by many programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from llmc.kernels.conv_recurrence import (
    Arguments,
    conv_delta_rule,
    conv_scan,
    delta_arguments,
    in_turn,
    scan_arguments,
)
from llmc.kernels.delta_rule import delta_rule as one_delta_rule
from llmc.kernels.registry import Fn, Op
from llmc.kernels.selective_scan import selective_scan as one_scan
from llmc.kernels.triton import delta_rule, selective_scan
from llmc.kernels.triton.counters import counters
from llmc.kernels.triton.define import define
from llmc.kernels.triton.launch import Plan, power_of_2
from llmc.kernels.triton.state import dense, takes_slots


def _plan(
    recurrence: Callable[..., Plan[Tensor]],
    arguments: Arguments,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str | None,
    state: Tensor,
    groups: int,
    *rest: Any,
) -> Plan[Tensor]:
    """The launch of the recurrence on x itself, with the convolution in it."""
    made = recurrence(*arguments(dense(x), groups, *rest))
    (launch,) = made.launches
    taps = weight.shape[1]
    fused = replace(
        launch,
        args={
            **launch.args, "conv_weight": weight.contiguous(),
            "conv_bias": None if bias is None else bias.contiguous(), "conv_state": state,
            "counter": counters(x.device, launch.grid[0] * groups),
        },
        constants={
            **launch.constants, "TAPS": taps, "TAPS_PAD": power_of_2(taps - 1),
            "SILU": act == "silu",
        },
    )  # fmt: skip
    return Plan(out=made.out, launches=(fused,))


plan_delta_rule = partial(_plan, delta_rule.plan, delta_arguments)
plan_scan = partial(_plan, selective_scan.plan, scan_arguments)


def _run(plan: Callable[..., Plan[Tensor]], recurrence: Op, arguments: Arguments) -> Fn:
    both = in_turn(recurrence, arguments, "triton", "torch")

    def run(x: Tensor, *rest: Any) -> Tensor:
        requests = rest[-1].shape[0]
        made: Tensor = plan(x, *rest).run() if x.shape[0] <= requests else both(x, *rest)
        return made

    return run


def _supports(*, conv_state: Tensor, **others: Any) -> bool:
    return conv_state.is_contiguous() and takes_slots(conv_state=conv_state, **others)


run_delta_rule = _run(plan_delta_rule, one_delta_rule, delta_arguments)
run_scan = _run(plan_scan, one_scan, scan_arguments)

define(conv_delta_rule, run=run_delta_rule, supports=_supports)
define(conv_scan, run=run_scan, supports=_supports)
