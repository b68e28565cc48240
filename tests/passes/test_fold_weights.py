"""fold_weights: functions of one parameter are computed when it is loaded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import (
    Values,
    apply,
    assert_idempotent,
    assert_same,
    histogram,
    roles,
    run,
    step,
    trace,
    weight,
)
from torch import Tensor

from llmc.passes.fold_weights import fold_weights
from llmc.passes.inputs import WeightInput

GEN = torch.Generator().manual_seed(0)
X = step(torch.randn(1, 5, 6, generator=GEN), dynamic=1)
LOG = torch.randn(6, generator=GEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_computed_from_their_logarithms(dtype: torch.dtype) -> None:
    def scaled(x: Tensor, a: Tensor) -> Tensor:
        return -a.float().exp() * x

    inputs = {"x": X, "a": weight("a", LOG.to(dtype))}
    gm = trace(scaled, **inputs)
    folded, (report,) = apply(gm, fold_weights())
    assert report.removed["aten.exp.default"] == report.removed["aten.neg.default"] == 1
    assert histogram(folded) == {"aten.mul.Tensor": 1}
    (role,) = roles(folded, WeightInput)
    name = str(dtype).removeprefix("torch.")
    casts = (name,) if dtype == torch.float32 else (name, "float32")
    assert role == WeightInput(parts=("a",), functions=(*casts, "exp", "neg"))
    assert_same(folded, gm, Values.of(**inputs), 0)  # the parameter's own rounding stays
    assert_idempotent(gm, fold_weights())


def test_reshapes_in_between_and_parameters_that_are_read_twice() -> None:
    def scaled(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return -(a.exp().view(1, 1, 6)) * x, x + a.exp()

    inputs = {"x": X, "a": weight("a", LOG)}
    gm = trace(scaled, **inputs)
    folded, _ = apply(gm, fold_weights())
    assert not {"aten.exp.default", "aten.neg.default"} & set(histogram(folded))
    found = {role.functions for role in roles(folded, WeightInput)}
    assert found == {("float32", "exp"), ("float32", "exp", "neg")}
    for got, want in zip(*(run(g, Values.of(**inputs)) for g in (folded, gm)), strict=True):
        assert torch.equal(got, want)


def test_a_layer_norms_weight_that_is_stored_less_one() -> None:
    inputs = {
        "x": step(X.tensor.bfloat16(), dynamic=1),
        "w": weight("w", LOG.bfloat16()),
        "b": weight("b", LOG.bfloat16()),
    }

    def normed(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return F.layer_norm(x, (6,), w + 1, b, 1e-5), x + (b + 1)

    gm = trace(normed, **inputs)
    folded, _ = apply(gm, fold_weights())
    assert histogram(folded)["aten.add.Tensor"] == 2, "a bias is no weight"
    assert {role.functions for role in roles(folded, WeightInput)} == {(), ("bfloat16", "plus_one")}
    assert_same(folded, gm, Values.of(**inputs), 0)
    assert_idempotent(gm, fold_weights())


def test_leaves_alone_what_depends_on_tokens() -> None:
    gm = trace(lambda x, a: -(x + a).exp(), x=X, a=weight("a", LOG))
    _, (report,) = apply(gm, fold_weights())
    assert not report.changed
