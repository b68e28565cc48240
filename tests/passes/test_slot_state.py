"""slot_state: recurrent calls get slots and the bounds of the packed requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_graphs import apply, assert_idempotent, ops, roles, step, trace
from torch import Tensor, fx

from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.linear_recurrence import linear_recurrence
from llmc.kernels.selective_scan import selective_scan
from llmc.passes.inputs import StateInput, StepInput, input_of
from llmc.passes.slot_state import slot_state

TOKENS = 6
FRESH = (None, None, None, None)
IDS = step(torch.arange(TOKENS))
X = step(torch.randn(TOKENS, 3, 4))


def every_op(token_ids: Tensor, x: Tensor) -> Tensor:
    flat = x.flatten(1)
    y = causal_conv.overload(flat, flat.new_ones(12, 3), *[None] * 4, *FRESH)
    y = linear_recurrence.overload(y, y.sigmoid(), *FRESH).view(-1, 3, 4)
    y = torch.tanh(y) * 0.3
    key, beta, unset = y[:, :1], y[..., 0].sigmoid(), (None, None, None)  # one head of keys
    y = delta_rule.overload(key, key, y, -y.abs(), beta, 1.0, None, *unset, *FRESH)
    dt, rate, options = y[..., 0].exp(), -y.new_ones(3, 1), (False, 0.0, math.inf, torch.float32)
    y = selective_scan.overload(y, dt, rate, y[:, :1], y[:, :1], *unset, *options, *FRESH)
    return y.flatten(1) + token_ids[:, None]


def run(gm: fx.GraphModule, ids: Tensor, x: Tensor, given: dict[Any, Tensor]) -> Tensor:
    def value(node: fx.Node) -> Tensor:
        role = input_of(node)
        if isinstance(role, StateInput):
            return given[role.call]
        assert isinstance(role, StepInput)
        return {"token_ids": ids, "x": x, **given}[role.name]

    return fx.Interpreter(gm).run(*(value(n) for n in gm.graph.nodes if n.op == "placeholder"))


@pytest.fixture(name="slotted", scope="module")
def _slotted() -> fx.GraphModule:
    return apply(trace(every_op, token_ids=IDS, x=X), slot_state())[0]


def test_every_call_has_a_state_of_its_shape(slotted: fx.GraphModule) -> None:
    shapes = {
        role.op: tuple(n.meta["val"].shape[1:])
        for n in slotted.graph.nodes
        if isinstance(role := input_of(n), StateInput)
    }
    assert shapes == {
        "causal_conv": (12, 2),
        "linear_recurrence": (12,),
        "delta_rule": (3, 4, 4),
        "selective_scan": (3, 4, 4),
    }
    assert {r.name for r in roles(slotted, StepInput)} == {
        "token_ids",
        "x",
        "query_start",
        "context_len",
        "request_row",
    }


def pieces() -> Iterator[tuple[int, int]]:
    yield from ((0, 1), (1, 4), (4, TOKENS))


def test_pieces_beside_another_request_give_what_the_whole_gives(slotted: fx.GraphModule) -> None:
    ids, x = IDS.tensor, X.tensor
    want = run(trace(every_op, token_ids=IDS, x=X), ids, x, {})
    states: dict[Any, Tensor] = {
        role.call: torch.full((4, *n.meta["val"].shape[1:]), float("nan"))
        for n in slotted.graph.nodes
        if isinstance(role := input_of(n), StateInput)
    }
    got = []
    for first, last in pieces():
        bounds = {
            "query_start": torch.tensor([0, 2, 2 + last - first], dtype=torch.int32),
            "context_len": torch.tensor([2, last], dtype=torch.int32),
            "request_row": torch.tensor([3, 1]),
        }
        both = [torch.cat((t[:2], t[first:last])) for t in (ids, x)]
        got.append(run(slotted, *both, states | bounds)[2:])
    torch.testing.assert_close(torch.cat(got), want, rtol=1e-5, atol=1e-5)


def test_changes_nothing_the_second_time() -> None:
    assert_idempotent(trace(every_op, token_ids=IDS, x=X), slot_state())


def test_a_graph_without_recurrence_is_left_alone() -> None:
    gm = trace(lambda token_ids, x: x * 2, token_ids=IDS, x=X)
    same, (report,) = apply(gm, slot_state())
    assert ops(same) == ops(gm) and not report.added
