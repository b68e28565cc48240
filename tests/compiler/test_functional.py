"""In-place ops become values where nobody can tell; models' odd spellings become traceable."""

from __future__ import annotations

from collections.abc import Callable

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


@pytest.mark.parametrize("fn", [in_place, through_a_view, with_a_view])
def test_the_numbers_stay(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4)
    gm = make_fx(fn)(x.clone())
    make_functional(gm.graph)
    gm.recompile()
    torch.testing.assert_close(gm(x.clone()), fn(x.clone()))


def mutating(gm: fx.GraphModule) -> list[str]:
    return [
        str(n.target)
        for n in gm.graph.nodes
        if getattr(n.target, "_schema", None) and n.target._schema.is_mutable
    ]


def test_own_values_are_written_no_more_and_views_still_are() -> None:
    x = torch.randn(3, 4)
    plain, viewed = make_fx(in_place)(x), make_fx(through_a_view)(x)
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

    def pick(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., [-2], :], x[..., [-1], :]

    gm = fx.symbolic_trace(pick)
    lists_to_slices(gm.graph)
    gm.recompile()
    x = torch.randn(2, 5, 3)
    assert all(torch.equal(a, b) for a, b in zip(gm(x), pick(x), strict=True))
    assert not any(
        isinstance(i, list) for n in gm.graph.nodes if n.op == "call_function" for i in n.args[1]
    )
