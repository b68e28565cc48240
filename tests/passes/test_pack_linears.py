"""pack_linears: weights of linears are reordered at load for the CPU library."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import (
    Values,
    apply,
    assert_idempotent,
    assert_same,
    ops,
    roles,
    step,
    trace,
    weight,
)
from torch import Tensor

from llmc.passes.inputs import WeightInput
from llmc.passes.pack_linears import pack_linears, packed_linear_available

GEN = torch.Generator().manual_seed(0)
X = step(torch.randn(1, 5, 32, generator=GEN).bfloat16(), dynamic=1)
W = weight("w", torch.randn(48, 32, generator=GEN).bfloat16())
B = weight("b", torch.randn(48, generator=GEN).bfloat16())

needs_library = pytest.mark.skipif(
    not packed_linear_available(), reason="this torch has no packed linear"
)


@needs_library
@pytest.mark.parametrize("biased", [False, True])
def test_rewrites(biased: bool) -> None:
    inputs = {"x": X, "w": W} | ({"b": B} if biased else {})

    def linear(x: Tensor, w: Tensor, *b: Tensor) -> Tensor:
        return F.linear(x, w, *b)

    gm = trace(linear, **inputs)
    packed, (report,) = apply(gm, pack_linears())
    assert report.removed == {"aten.linear.default": 1}
    assert report.added == {"mkldnn._linear_pointwise.default": 1}
    assert WeightInput(parts=("w",), packed=True) in roles(packed, WeightInput)
    assert WeightInput(parts=("w",)) not in roles(packed, WeightInput), "the plain one is freed"
    assert_same(packed, gm, Values.of(**inputs), 2e-2)
    assert_idempotent(gm, pack_linears())


def test_leaves_float32_alone_and_says_why() -> None:
    gm = trace(F.linear, x=step(X.tensor.float(), dynamic=1), w=weight("w", W.tensor.float()))
    _, (report,) = apply(gm, pack_linears())
    assert not report.added
    assert report.notes == ("linear: torch.float32 gains nothing from packing",)


def test_leaves_a_tied_weight_alone_and_says_why() -> None:
    """The embedding reads its rows, so packing would keep two copies."""

    def tied(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w) + F.embedding(torch.zeros(5, dtype=torch.int64), w).sum()

    packed, (report,) = apply(trace(tied, x=X, w=W), pack_linears())
    assert ops(packed)["aten.linear.default"] == 1
    (note,) = report.notes
    assert "shared with another op (tied embedding)" in note


def test_leaves_a_computed_weight_alone_and_says_why() -> None:
    _, (report,) = apply(trace(lambda x, w: F.linear(x, w * 2), x=X, w=W), pack_linears())
    assert report.notes == ("linear: the weight is computed",)
