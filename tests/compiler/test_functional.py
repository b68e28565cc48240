"""In-place ops become values where nobody can tell; models' odd spellings become traceable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from llmc.compiler.functional import make_functional
from llmc.compiler.traceable import lists_to_slices, traceable_torch


def in_place(x: Tensor) -> Tensor:
    y = x + 1
    y.mul_(2)
    y /= y.sum()
    return y


def through_a_view(x: Tensor) -> Tensor:
    y = x + 1
    y[0].mul_(2)
    return y


def with_a_view(x: Tensor) -> Tensor:
    y = x + 1
    first = y[0]
    y.mul_(2)
    return y + first


def through_dropout(x: Tensor) -> Tensor:
    y = x + 1
    same = torch.nn.functional.dropout(y, 0.1, training=False)
    same.mul_(2)
    return y + same


def through_einsum(x: Tensor) -> Tensor:
    y = x + 1
    turned = torch.einsum("ij->ji", y)
    turned.mul_(2)
    return y


def by_more_bits(x: Tensor) -> Tensor:
    y = x.to(torch.bfloat16) + 1
    y *= x.sin()
    y += x
    return y * 2


def by_comparing(x: Tensor) -> Tensor:
    y = x + 0
    y.gt_(0.5)
    return y * 3


@pytest.mark.parametrize(
    "fn",
    [
        in_place,
        through_a_view,
        with_a_view,
        through_dropout,
        through_einsum,
        by_more_bits,
        by_comparing,
    ],
)
def test_the_numbers_stay(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4)
    gm = make_fx(fn, tracing_mode="fake", pre_dispatch=True)(x.clone())
    make_functional(gm.graph)
    torch.testing.assert_close(Checked(gm).run(x.clone()), fn(x.clone()), rtol=0, atol=0)


class Checked(fx.Interpreter):
    """Runs a graph, and compares the dtypes of its values with those that passes read."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        assert n.op == "output" or value.dtype == n.meta["val"].dtype, n
        return value


def mutating(gm: fx.GraphModule) -> list[str]:
    return [
        str(n.target)
        for n in gm.graph.nodes
        if getattr(n.target, "_schema", None) and n.target._schema.is_mutable
    ]


def test_own_values_are_written_no_more_and_views_still_are() -> None:
    x = torch.randn(3, 4)
    plain, viewed = (make_fx(f, tracing_mode="fake")(x) for f in (in_place, through_a_view))
    for gm in (plain, viewed):
        make_functional(gm.graph)
    assert mutating(plain) == []
    assert len(mutating(viewed)) == 1


def test_constants_are_filled_and_single_indices_are_slices() -> None:
    original = torch.tensor
    with traceable_torch():
        filled = [torch.tensor(d) for d in (0.5, 3, True)] + [torch.tensor([1, 2])]
    assert torch.tensor is original
    for got, want in zip(filled, (0.5, 3, True, [1, 2]), strict=True):
        assert got.dtype == original(want).dtype and torch.equal(got, original(want))

    def pick(x: Tensor) -> tuple[Tensor, ...]:
        return x[..., [-2], :], x[..., [-1], :]

    gm = fx.symbolic_trace(pick)
    lists_to_slices(gm.graph)
    gm.recompile()
    x = torch.randn(2, 5, 3)
    assert all(torch.equal(a, b) for a, b in zip(gm(x), pick(x), strict=True))
    assert not any(
        isinstance(i, list) for n in gm.graph.nodes if n.op == "call_function" for i in n.args[1]
    )


def test_single_indices_next_to_others_stay() -> None:
    """Lists and tensors of indices select elements together: a slice would keep a dimension."""

    def pick(x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        return x[[0], [1]], x[rows, [1]], x[[2], :, rows], x[[0], 1]

    gm = fx.symbolic_trace(pick)
    lists_to_slices(gm.graph)
    gm.recompile()
    x, rows = torch.randn(3, 4, 3), torch.tensor([0, 2])
    for got, want in zip(gm(x, rows), pick(x, rows), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
