"""find_convolutions: a causal convolution per channel becomes the op; others are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Values, apply, assert_idempotent, assert_same, ops, step, trace, weight
from torch import Tensor

from llmc.passes.find_convolutions import find_convolutions

CHANNELS, TOKENS, WIDTH = 6, 9, 4
INPUTS = {
    "x": step(torch.randn(1, CHANNELS, TOKENS), dynamic=2),
    "w": weight("w", torch.randn(CHANNELS, 1, WIDTH)),
    "b": weight("b", torch.randn(CHANNELS)),
}


def conv(**changes: Any) -> Any:
    options = {"padding": WIDTH - 1, "groups": CHANNELS} | changes

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv1d(x, w, b, **options)[..., : x.shape[-1]]

    return trace(forward, **INPUTS)


def test_rewrites_and_gives_the_same_numbers() -> None:
    gm = conv()
    found, _ = apply(gm, find_convolutions())
    assert ops(found)["llmc.causal_conv.default"] == 1
    assert "aten.conv1d.default" not in ops(found)
    assert_same(found, gm, Values.of(**INPUTS))


@pytest.mark.parametrize("changes", [{"padding": WIDTH}, {"padding": 6, "dilation": 2}])
def test_leaves_alone_and_says_so(changes: dict[str, Any]) -> None:
    gm = conv(**changes)
    same, (report,) = apply(gm, find_convolutions())
    assert ops(same) == ops(gm)
    assert "last K tokens" in report.notes[0]


def test_changes_nothing_the_second_time() -> None:
    assert_idempotent(conv(), find_convolutions())
