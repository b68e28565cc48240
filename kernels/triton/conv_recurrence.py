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
    delta_rule_in_turn,
    scan_arguments,
    scan_in_turn,
)
from llmc.kernels.registry import Fn
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


def _choose(plan: Callable[..., Plan[Tensor]], in_turn: Fn) -> Fn:
    def run(x: Tensor, *rest: Any) -> Tensor:
        requests = rest[-1].shape[0]
        made: Tensor = plan(x, *rest).run() if x.shape[0] <= requests else in_turn(x, *rest)
        return made

    return run


def _supports(*, conv_state: Tensor, **others: Any) -> bool:
    return conv_state.is_contiguous() and takes_slots(conv_state=conv_state, **others)


define(conv_delta_rule, run=_choose(plan_delta_rule, delta_rule_in_turn), supports=_supports)
define(conv_scan, run=_choose(plan_scan, scan_in_turn), supports=_supports)
