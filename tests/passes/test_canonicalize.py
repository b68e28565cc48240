"""canonicalize: no op that does nothing, and every linear spelled as a linear."""

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

from llmc.passes.canonicalize import canonicalize
from llmc.passes.inputs import WeightInput

GEN = torch.Generator().manual_seed(0)
X = step(torch.randn(1, 5, 8, generator=GEN), dynamic=1)


def test_drops_ops_that_do_nothing() -> None:
    def idle(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.1, training=False)
        y = F.dropout(y, 0.0, training=True)
        y = y.to(torch.float32).detach()[:, :, :]
        y = (y * 1.0 / 1).view(x.shape).reshape(x.shape)
        return y.expand(1, -1, 8) + 1

    gm = trace(idle, x=X)
    clean, (report,) = apply(gm, canonicalize())
    assert ops(clean) == {"aten.add.Tensor": 1}
    assert report.removed["aten.dropout.default"] == 2
    assert not report.added
    assert_same(clean, gm, Values.of(x=X), 0)
    assert_idempotent(gm, canonicalize())


def test_keeps_ops_that_do_something() -> None:
    def busy(x: Tensor) -> Tensor:
        y = x.to(torch.float64)[:, :, 2:] * 2.0
        return y.to(torch.float32).view(1, -1, 2, 3)

    gm = trace(busy, x=X)
    clean, _ = apply(gm, canonicalize())
    assert ops(clean) == {
        "aten.to.dtype": 2,
        "aten.slice.Tensor": 1,
        "aten.mul.Tensor": 1,
        "aten.view.default": 1,
    }
    assert_same(clean, gm, Values.of(x=X), 0)


def test_a_type_as_becomes_a_cast_or_nothing() -> None:
    gm = trace(lambda x, y: (x.type_as(y), x.type_as(x)), x=X, y=step(torch.zeros(2).double()))
    clean, _ = apply(gm, canonicalize())
    assert ops(clean) == {"aten.to.dtype": 1}


def test_an_empty_part_of_a_cat_is_dropped() -> None:
    gm = trace(lambda x: torch.cat((x, x[..., 8:]), dim=-1) + 1, x=X)
    clean, _ = apply(gm, canonicalize())
    assert ops(clean) == {"aten.add.Tensor": 1}
    assert_same(clean, gm, Values.of(x=X), 0)


def test_a_transposed_linear_becomes_a_linear() -> None:
    """y = bias + x @ w with w stored [in, out]: the loader turns it, once for both readers."""
    inputs = {
        "x": X,
        "w": weight("w", torch.randn(8, 6, generator=GEN)),
        "b": weight("b", torch.randn(6, generator=GEN)),
    }

    def conv1d(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x.view(-1, 8), w) * torch.addmm(b, x.view(-1, 8) + 1, w)

    gm = trace(conv1d, **inputs)
    clean, (report,) = apply(gm, canonicalize())
    assert report.removed == {"aten.addmm.default": 2}
    assert report.added == {"aten.linear.default": 2}
    assert WeightInput(parts=("w",), transposed=True) in roles(clean, WeightInput)
    assert len(roles(clean, WeightInput)) == 2
    assert_same(clean, gm, Values.of(**inputs))
    assert_idempotent(gm, canonicalize())


def test_a_linear_over_rows_whose_shape_is_restored_keeps_the_shape() -> None:
    """As in GPT-2, whose Conv1D multiplies a matrix of rows."""
    inputs = {
        "x": X,
        "w": weight("w", torch.randn(8, 6, generator=GEN)),
        "b": weight("b", torch.randn(6, generator=GEN)),
    }

    def conv1d(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x.view(-1, x.size(-1)), w).view(*x.size()[:-1], 6)

    def split(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x.view(-1, 8), w).view(1, -1, 2, 3)

    gm = trace(conv1d, **inputs)
    clean, (report,) = apply(gm, canonicalize())
    assert "aten.view.default" not in ops(clean) and report.added == {"aten.linear.default": 1}
    assert_same(clean, gm, Values.of(**inputs))
    assert_idempotent(gm, canonicalize())
    gm = trace(split, **inputs)
    clean, _ = apply(gm, canonicalize())
    assert ops(clean)["aten.view.default"] == 2, "which is another shape than that of x"
    assert_same(clean, gm, Values.of(**inputs))


def test_a_product_with_a_turned_weight_becomes_a_linear() -> None:
    inputs = {"x": X, "w": weight("w", torch.randn(6, 8, generator=GEN))}

    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.T + (x.view(-1, 8) @ w.t()).view(*x.shape[:-1], 6) + x @ (w + 1).T

    gm = trace(product, **inputs)
    clean, _ = apply(gm, canonicalize())
    assert ops(clean)["aten.linear.default"] == 2  # the third weight is computed
    assert ops(clean)["aten.matmul.default"] == ops(clean)["aten.numpy_T.default"] == 1
    assert_same(clean, gm, Values.of(**inputs))
    assert_idempotent(gm, canonicalize())


def test_leaves_alone_a_scaled_addmm_and_a_matrix_bias() -> None:
    w = weight("w", torch.randn(8, 6, generator=GEN))
    flat = step(torch.randn(5, 8, generator=GEN))
    scaled = trace(
        lambda x, w, b: torch.addmm(b, x, w, alpha=2.0),
        x=flat,
        w=w,
        b=weight("b", torch.zeros(6)),
    )
    matrix = trace(lambda x, w, b: torch.addmm(b, x, w), x=flat, w=w, b=step(torch.zeros(5, 6)))
    for gm in (scaled, matrix):
        clean, _ = apply(gm, canonicalize())
        assert ops(clean) == {"aten.addmm.default": 1}


def _filled(x: Tensor, cuts: list[tuple[int, int]], *, reads_early: bool = False) -> Tensor:
    y = x.new_empty(*x.shape[:-1], 8)
    early = y.view(-1) if reads_early else x
    for start, end in cuts:
        y[..., start:end].copy_(x[..., start:end] * (start + 1))
    return y + 1 if not reads_early else y + early.view(x.shape)


def test_what_is_filled_in_parts_is_joined() -> None:
    gm = trace(lambda x: _filled(x, [(0, 3), (3, 8)]), x=X)
    clean, (report,) = apply(gm, canonicalize())
    assert report.removed["aten.copy_.default"] == 2 and report.added == {"aten.cat.default": 1}
    assert_same(clean, gm, Values.of(x=X), 0)
    assert_idempotent(gm, canonicalize())


@pytest.mark.parametrize(
    ("cuts", "reads_early"),
    [([(0, 3), (4, 8)], False), ([(3, 8), (0, 3)], False), ([(0, 3), (3, 8)], True)],
    ids=["a gap", "backwards", "read before"],
)
def test_what_is_filled_otherwise_is_left_alone(
    cuts: list[tuple[int, int]], reads_early: bool
) -> None:
    gm = trace(lambda x: _filled(x, cuts, reads_early=reads_early), x=X)
    clean, _ = apply(gm, canonicalize())
    assert ops(clean)["aten.copy_.default"] == 2
