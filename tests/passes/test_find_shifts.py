"""find_shifts: a sequence moved by one token becomes the op; what only looks like it stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Values, apply, assert_idempotent, assert_same, ops, step, trace
from torch import Tensor

from llmc.passes.find_shifts import find_shifts

TOKENS, CHANNELS = 9, 6
INPUTS = {
    "x": step(torch.randn(1, TOKENS, CHANNELS), dynamic=1),
    "positions": step(torch.arange(TOKENS)),
}


def padded(x: Tensor, positions: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1)) + positions[None, :, None]


def joined(x: Tensor, positions: Tensor) -> Tensor:
    first = x.new_zeros(1, 1, CHANNELS) + 3.0
    return torch.cat([first, x[:, :-1]], dim=1) + positions[None, :, None]


def moved_by_two(x: Tensor, positions: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 2, -2)) + positions[None, :, None]


def channels_moved(x: Tensor, positions: Tensor) -> Tensor:
    return F.pad(x, (1, -1)) + positions[None, :, None]


@pytest.mark.parametrize("function", [padded, joined])
def test_rewrites_and_gives_the_same_numbers(function: Callable[..., Tensor]) -> None:
    gm = trace(function, **INPUTS)
    found, _ = apply(gm, find_shifts())
    assert ops(found)["llmc.causal_conv.default"] == 1
    assert_same(found, gm, Values.of(**INPUTS))


@pytest.mark.parametrize("function", [moved_by_two, channels_moved])
def test_leaves_alone(function: Callable[..., Tensor]) -> None:
    gm = trace(function, **INPUTS)
    assert ops(apply(gm, find_shifts())[0]) == ops(gm)


def test_changes_nothing_the_second_time() -> None:
    assert_idempotent(trace(joined, **INPUTS), find_shifts())
