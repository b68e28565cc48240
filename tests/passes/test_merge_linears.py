"""merge_linears: linears over one input become one linear over concatenated weights."""

from __future__ import annotations

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

from llmc.kernels.quantized_linear import Quantization
from llmc.passes.inputs import WeightInput
from llmc.passes.merge_linears import merge_linears


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X = step(rand(1, 5, 8), dynamic=1)
WA, WB, WC = weight("a", rand(6, 8)), weight("b", rand(4, 8)), weight("c", rand(3, 8))
BA, BB = weight("ba", rand(6)), weight("bb", rand(4))


def test_rewrites_three_linears_over_one_input() -> None:
    inputs = {"x": X, "wa": WA, "wb": WB, "wc": WC}
    gm = trace(lambda x, a, b, c: (F.linear(x, a), F.linear(x, b), F.linear(x, c)), **inputs)
    merged, (report,) = apply(gm, merge_linears())
    assert report.removed == {"aten.linear.default": 2}
    assert report.added == {"aten.split_with_sizes.default": 1, "<built-in function getitem>": 3}
    assert roles(merged, WeightInput) == [WeightInput(parts=("a", "b", "c"))]
    assert_same(merged, gm, Values.of(**inputs))
    assert_idempotent(gm, merge_linears())


def test_weights_that_keep_different_bits_stay_apart() -> None:
    """And those of which a block would have channels of two."""
    wide = weight("a", rand(16, 8)), weight("c", rand(32, 8))
    inputs = {"x": X, "wa": wide[0], "wb": WB, "wc": wide[1]}
    gm = trace(lambda x, a, b, c: (F.linear(x, a), F.linear(x, b), F.linear(x, c)), **inputs)
    four, eight = Quantization(format="int4", group=32), Quantization(format="int8", group=16)
    split = merge_linears(kept=(("a", four), ("b", eight), ("c", four)))
    merged, _ = apply(gm, split)
    parts = [role.parts for role in roles(merged, WeightInput)]
    assert sorted(parts) == [("a", "c"), ("b",)]
    assert_same(merged, gm, Values.of(**inputs))
    assert_idempotent(gm, split)
    odd, _ = apply(gm, merge_linears(kept=(("a", four), ("b", four), ("c", four))))
    assert sorted(role.parts for role in roles(odd, WeightInput)) == [("a", "c"), ("b",)]
    merged, _ = apply(gm, merge_linears(kept=(("b", eight),)))
    assert sorted(role.parts for role in roles(merged, WeightInput)) == [("a", "c"), ("b",)]


def test_biases_are_merged_with_the_weights() -> None:
    inputs = {"x": X, "wa": WA, "wb": WB, "ba": BA, "bb": BB}
    gm = trace(lambda x, a, b, ba, bb: F.linear(x, a, ba) - F.linear(x, b, bb)[..., :1], **inputs)
    merged, _ = apply(gm, merge_linears())
    parts = [role.parts for role in roles(merged, WeightInput)]
    assert sorted(parts) == [("a", "b"), ("ba", "bb")]
    assert_same(merged, gm, Values.of(**inputs))


def test_leaves_alone_linears_over_different_inputs() -> None:
    gm = trace(lambda x, a, b: (F.linear(x, a), F.linear(x + 1, b)), x=X, wa=WA, wb=WB)
    _, (report,) = apply(gm, merge_linears())
    assert (report.added, report.removed, report.notes) == ({}, {}, ())


def test_merges_linears_with_a_bias_and_those_without_apart() -> None:
    inputs = {"x": X, "wa": WA, "wb": WB, "wc": WC, "ba": BA}
    gm = trace(
        lambda x, a, b, c, ba: (F.linear(x, a, ba), F.linear(x, b), F.linear(x, c)), **inputs
    )
    merged, (report,) = apply(gm, merge_linears())
    assert ops(merged)["aten.linear.default"] == 2 and not report.notes
    assert [r.parts for r in roles(merged, WeightInput) if len(r.parts) > 1] == [("b", "c")]
    assert_same(merged, gm, Values.of(**inputs))


def test_leaves_alone_a_shared_weight() -> None:
    """A weight that another op reads must stay as it is stored; copying it would double it."""
    gm = trace(lambda x, a, b: (F.linear(x, a), F.linear(x, b), a.sum()), x=X, wa=WA, wb=WB)
    _, (report,) = apply(gm, merge_linears())
    assert not report.added
    assert report.notes == ("linear, linear_1: a weight is shared with another op",)


def test_leaves_alone_a_computed_weight() -> None:
    gm = trace(lambda x, a, b: (F.linear(x, a * 2), F.linear(x, b)), x=X, wa=WA, wb=WB)
    _, (report,) = apply(gm, merge_linears())
    assert report.notes == ("linear, linear_1: a weight is computed",)


def test_a_router_is_merged_with_the_gate_of_a_shared_expert_alone() -> None:
    """Were it part of a large linear, that would not be quantized, or the router would be."""
    inputs = {"x": X, "wa": WA, "wb": WB, "wc": WC, "gate": weight("g", rand(1, 8))}

    def run(x: Tensor, wa: Tensor, wb: Tensor, wc: Tensor, gate: Tensor) -> list[Tensor]:
        value, index = F.linear(x, wb).softmax(-1).topk(2)
        return [F.linear(x, wa), value, index, F.linear(x, gate), F.linear(x, wc)]

    gm = trace(run, **inputs)
    merged, _ = apply(gm, merge_linears())
    parts = sorted(role.parts for role in roles(merged, WeightInput))
    assert parts == [("a", "c"), ("b", "g")]
    assert_same(merged, gm, Values.of(**inputs))
    assert_idempotent(gm, merge_linears())
