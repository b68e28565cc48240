"""Ops with a state: the version in torch against the reference, and steps against the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import (
    TOLERANCE,
    assert_same_effect,
    assert_same_schema,
    case_params,
    cases,
    require_cpu_ops,
)
from state_draws import CONV_OPS, STATE_OPS
from torch import Tensor

from llmc.kernels.registry import OPS

IN_TORCH = (*STATE_OPS, "running_max")
NUM_STEP_INPUTS = 3  # query_start, context_len, request_row: the last arguments; the state before


@pytest.mark.parametrize(("name", "dtype", "index"), case_params([*IN_TORCH, *CONV_OPS]))
def test_all_requests_at_once_match_the_reference(
    name: str, dtype: torch.dtype, index: int
) -> None:
    op = OPS[name]
    (impl,) = [i for i in op.impls if i.name == "torch"]
    case = list(cases(name, dtype))[index]
    assert_same_schema(op, impl)
    assert_same_effect(op.reference, impl.op(), case, dtype)


def per_token(name: str, args: list[Any]) -> list[bool]:
    """Which arguments have a row a token (weights have none)."""
    tokens = args[0].shape[0]
    weights_of = {"causal_conv": (1, 2), "delta_rule": (7, 8), "selective_scan": (2, 5, 7)}
    weights_of |= {"decayed_softmax": (2, 3)}
    weights = weights_of.get(name, ())
    return [
        isinstance(a, Tensor) and i not in weights and a.shape[0] == tokens
        for i, a in enumerate(args)
    ]


@pytest.mark.parametrize(
    ("which", "name"),
    [
        *((which, name) for which in ("reference", "torch") for name in IN_TORCH),
        *(("cpu", name) for name in STATE_OPS),
    ],
)
@pytest.mark.parametrize("cuts", [(40,), (1, 40), (17, 18, 40), tuple(range(1, 41))])
def test_a_sequence_in_steps_is_the_sequence_at_once(
    name: str, which: str, cuts: tuple[int, ...]
) -> None:
    """However a request is cut, with another one beside it, its outputs are those of a whole."""
    op = OPS[name]
    if which == "cpu":
        require_cpu_ops()
    impls = {impl.name: impl for impl in op.impls}
    call = op.reference if which == "reference" else impls[which].op()
    *args, state = list(cases(name, torch.float32))[-1][:-NUM_STEP_INPUTS]
    rowwise = per_token(name, args)
    args = [a[-40:] if r else a for a, r in zip(args, rowwise, strict=True)]
    want = op.reference(*args, None, None, None, None)
    state = torch.full_like(state, float("nan"))
    got = []
    first = 0
    for last in cuts:
        count = last - first
        # the other request has one token, and comes first
        step = [
            torch.cat((a[:1], a[first:last])) if r else a
            for a, r in zip(args, rowwise, strict=True)
        ]
        start = torch.tensor([0, 1, 1 + count], dtype=torch.int32)
        length = torch.tensor([1, last], dtype=torch.int32)
        got.append(call(*step, state, start, length, torch.tensor([0, 2]))[1:])
        first = last
    torch.testing.assert_close(torch.cat(got), want, **TOLERANCE[torch.float32])
