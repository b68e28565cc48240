"""order_channels: a weight's rows are stored in the order in which their channels are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import (
    Values,
    apply,
    assert_idempotent,
    histogram,
    roles,
    run,
    step,
    trace,
    weight,
)
from torch import Tensor

from llmc.kernels.quantized_linear import Format
from llmc.passes.inputs import WeightInput
from llmc.passes.merge_linears import merge_linears
from llmc.passes.order_channels import order_channels
from llmc.passes.quantize_linears import quantize_linears

GEN = torch.Generator().manual_seed(0)
X = step(torch.randn(1, 5, 8, generator=GEN), dynamic=1)
W = weight("w", torch.randn(24, 8, generator=GEN))
V = weight("v", torch.randn(4, 8, generator=GEN))
INPUTS = {"x": X, "w": W, "v": V}


def by_head(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two groups of 3 + 3 + 6 channels, as a projection of query, key and two heads of value."""
    tokens = x.shape[1]
    q, k, u = F.linear(x, w).view(1, tokens, 2, 12).split([3, 3, 6], dim=3)
    a, b = F.linear(x, v).view(1, tokens, 2, 2).split([1, 1], dim=3)
    q, k, u = (y.reshape(1, tokens, -1) for y in (q, k, u.reshape(1, tokens, -1, 3)))
    mixed = torch.cat((q, k), dim=-1).transpose(1, 2) * 2
    return mixed, u.sigmoid(), a.reshape(1, tokens, 2).exp(), b.reshape(1, tokens, 2).exp()


def assert_equal(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_channels_of_heads_are_put_together() -> None:
    gm = trace(by_head, **INPUTS)
    merged, _ = apply(gm, merge_linears())
    ordered, (report,) = apply(merged, order_channels())
    assert report.removed["aten.cat.default"] == 1 and not report.notes
    moves = {"aten.cat.default", "aten.reshape.default", "aten.view.default"}
    assert not moves & set(histogram(ordered))
    (role,) = roles(ordered, WeightInput)
    rows = [row for start, n in role.order for row in range(start, start + n)]
    assert role.parts == ("w", "v") and sorted(rows) == list(range(28))
    assert rows != sorted(rows)
    assert_equal(run(ordered, Values.of(**INPUTS)), run(gm, Values.of(**INPUTS)))
    assert_idempotent(merged, order_channels())


def unchanged(fn: Callable[..., Any], *notes: str) -> None:
    gm = trace(fn, **INPUTS)
    _, (report,) = apply(gm, order_channels())
    assert not report.changed
    assert len(report.notes) == len(notes)
    assert all(part in note for part, note in zip(notes, report.notes, strict=True))


@pytest.mark.parametrize("parts", [(4, 20), (4, 0, 20)], ids=str)
def test_leaves_alone_channels_that_lie_together(parts: tuple[int, ...]) -> None:
    unchanged(lambda x, w, v: [y.exp() for y in F.linear(x, w).split(parts, dim=-1)] + [v])


def test_leaves_alone_results_that_are_also_read_whole_or_only_in_part() -> None:
    def pairs(y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = y.view(1, -1, 12, 2).unbind(-1)
        return a.exp(), b.exp()

    def whole(x: Tensor, w: Tensor, v: Tensor) -> Any:
        y = F.linear(x, w)
        return *pairs(y), y.exp(), v

    def some(x: Tensor, w: Tensor, v: Tensor) -> Any:
        first, _ = F.linear(x, w).view(1, -1, 12, 2).split([1, 1], dim=3)
        return first.reshape(1, -1, 12).exp(), v

    unchanged(whole)
    unchanged(some)


def pairs_of(y: Tensor, size: int) -> tuple[Tensor, Tensor]:
    a, b = y.view(1, -1, size, y.shape[2] // size).split([1, y.shape[2] // size - 1], dim=3)
    return a.reshape(1, -1, size).exp(), b.reshape(1, -1, y.shape[2] - size).exp()


def test_a_bias_is_permuted_too() -> None:
    inputs = {**INPUTS, "b": weight("b", torch.randn(24, generator=GEN))}
    gm = trace(lambda x, w, v, b: (*pairs_of(F.linear(x, w, b), 12), v), **inputs)
    ordered, (report,) = apply(gm, order_channels())
    assert report.changed and not report.notes
    assert {role.parts for role in roles(ordered, WeightInput) if role.order} == {("w",), ("b",)}
    assert_equal(run(ordered, Values.of(**inputs)), run(gm, Values.of(**inputs)))


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_rows_of_a_quantized_weight_are_permuted_with_their_scales(format: Format) -> None:
    inputs = {
        "x": step(torch.randn(1, 5, 64, generator=GEN), dynamic=1),
        "w": weight("w", torch.randn(48, 64, generator=GEN)),
    }
    gm = trace(lambda x, w: pairs_of(F.linear(x, w), 8), **inputs)
    quantized, _ = apply(gm, quantize_linears(format=format))
    ordered, (report,) = apply(quantized, order_channels())
    assert report.changed and not report.notes
    orders = {role.order for role in roles(ordered, WeightInput)}
    assert len(orders) == 1 and () not in orders
    want = run(quantized, Values.of(**inputs))
    assert_equal(run(ordered, Values.of(**inputs)), want)
    assert_idempotent(quantized, order_channels())
