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


def test_leaves_alone_a_convolution_over_the_features_of_each_token() -> None:
    """It is causal too, but over a dimension of a fixed size; the tokens are the batch."""
    inputs = INPUTS | {"x": step(torch.randn(TOKENS, CHANNELS, 9), dynamic=0)}

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv1d(x, w, b, padding=WIDTH - 1, groups=CHANNELS)[..., :9]

    gm = trace(forward, **inputs)
    same, _ = apply(gm, find_convolutions())
    assert ops(same) == ops(gm)


def test_changes_nothing_the_second_time() -> None:
    assert_idempotent(conv(), find_convolutions())


PADDED = INPUTS | {
    "w2": weight("w2", torch.randn(4, CHANNELS // 2, 3)),
    "b2": weight("b2", torch.randn(4)),
}


def padded(before: int) -> Any:
    def forward(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        first = F.conv1d(F.pad(x, (before, 0)), w, b, groups=CHANNELS)
        return F.conv1d(first, w2, b2, groups=2)

    return trace(forward, **PADDED)


def test_convolutions_of_a_padded_sequence_see_the_last_tokens_of_each() -> None:
    gm = padded(WIDTH - 1 + 2)
    found, _ = apply(gm, find_convolutions())
    assert ops(found)["llmc.causal_conv.default"] == 1
    assert ops(found)["aten.conv1d.default"] == 2
    assert_same(found, gm, Values.of(**PADDED))
    assert_idempotent(gm, find_convolutions())


def test_a_padding_that_is_not_used_up_is_left_alone() -> None:
    gm = padded(WIDTH + 2)
    assert ops(apply(gm, find_convolutions())[0]) == ops(gm)


def windows(x: Tensor, before: int) -> Tensor:
    """Of each token its channels and those of the WIDTH - 1 before it."""
    tokens = x.shape[-1]
    return F.pad(x, (before, 0))[..., -(tokens + before) :].unfold(-1, WIDTH, 1).flip(-1)


def test_windows_of_a_padded_sequence_are_the_last_tokens_of_each() -> None:
    x = {"x": INPUTS["x"]}
    gm = trace(lambda x: windows(x, WIDTH - 1), **x)
    found, _ = apply(gm, find_convolutions())
    assert ops(found)["llmc.causal_conv.default"] == 1
    assert not {"aten.unfold.default", "aten.pad.default"} & ops(found).keys()
    assert_same(found, gm, Values.of(**x))
    assert_idempotent(gm, find_convolutions())
    others = trace(lambda x: windows(x, WIDTH), **x)
    assert ops(apply(others, find_convolutions())[0]) == ops(others)
