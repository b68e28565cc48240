"""fuse_act_mul: activation and gate over two halves of one tensor become one op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Values, apply, assert_idempotent, assert_same, ops, step, trace
from torch import Tensor

from llmc.passes.fuse_act_mul import fuse_act_mul

GATE_UP = step(torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0)), dynamic=1)


def split(x: Tensor) -> tuple[Tensor, ...]:
    return x.split([8, 8], dim=-1)


@pytest.mark.parametrize(
    "act",
    [
        F.silu,
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        F.relu,
        lambda x: F.relu(x).square(),
        lambda x: F.relu(x) ** 2,
    ],
    ids=["silu", "gelu", "tanh", "relu", "relu2", "relu2 as a power"],
)
@pytest.mark.parametrize("halves", [split, lambda x: x.chunk(2, dim=-1)], ids=["split", "chunk"])
@pytest.mark.parametrize("swapped", [False, True])
def test_rewrites(act: object, halves: object, swapped: bool) -> None:
    def gated(x: Tensor) -> Tensor:
        gate, up = halves(x)  # type: ignore[operator]
        return up * act(gate) if swapped else act(gate) * up  # type: ignore[operator]

    gm = trace(gated, x=GATE_UP)
    fused, (report,) = apply(gm, fuse_act_mul())
    assert report.added == {"llmc.act_mul.default": 1}
    assert report.removed["aten.mul.Tensor"] == 1
    assert_same(fused, gm, Values.of(x=GATE_UP), 1e-6)
    assert_idempotent(gm, fuse_act_mul())


@pytest.mark.parametrize("first", [0, 1, 2])
def test_rewrites_two_neighbours_among_more_parts(first: int) -> None:
    """As of a layer that computes attention and feed-forward block from one input."""
    sizes = [3, 5]
    sizes[first:first] = [4, 4]

    def gated(x: Tensor) -> tuple[Tensor, ...]:
        parts = list(x.split(sizes, dim=-1))
        gate, up = parts[first : first + 2]
        return F.silu(gate) * up, *parts[:first], *parts[first + 2 :]

    gm = trace(gated, x=GATE_UP)
    fused, (report,) = apply(gm, fuse_act_mul())
    assert report.added == {"llmc.act_mul.default": 1, "aten.slice.Tensor": 1}
    assert_same(fused, gm, Values.of(x=GATE_UP), 1e-6)
    assert_idempotent(gm, fuse_act_mul())


def test_leaves_alone_parts_that_are_no_neighbours() -> None:
    def gated(x: Tensor) -> Tensor:
        gate, _, up, _ = x.split(4, dim=-1)
        return F.silu(gate) * up

    _, (report,) = apply(trace(gated, x=GATE_UP), fuse_act_mul())
    assert not report.added and not report.removed


def test_leaves_alone_the_second_half_as_gate() -> None:
    """The op activates the first half; a model that gates the other way round must not match."""

    def gated(x: Tensor) -> Tensor:
        up, gate = split(x)
        return F.silu(gate) * up

    _, (report,) = apply(trace(gated, x=GATE_UP), fuse_act_mul())
    assert not report.added and not report.removed


def test_leaves_alone_unequal_parts_and_other_dimensions() -> None:
    def unequal(x: Tensor) -> Tensor:
        gate, up = x.split([4, 12], dim=-1)
        return F.silu(gate) * up[..., :4]

    def rows(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        return F.silu(gate) * up

    square = step(torch.randn(1, 16, 16), dynamic=None)
    for fn in (unequal, rows):
        _, (report,) = apply(trace(fn, x=square), fuse_act_mul())
        assert not report.added and not report.removed


def test_leaves_alone_halves_of_two_tensors() -> None:
    def gated(x: Tensor, y: Tensor) -> Tensor:
        return F.silu(split(x)[0]) * split(y)[1]

    _, (report,) = apply(trace(gated, x=GATE_UP, y=GATE_UP), fuse_act_mul())
    assert not report.added and not report.removed


def interleaved(x: Tensor) -> tuple[Tensor, ...]:
    return x[..., ::2], x[..., 1::2]


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=0.5), up.clamp(min=-0.5, max=0.5)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@pytest.mark.parametrize("parts", [split, interleaved], ids=["split", "interleaved"])
@pytest.mark.parametrize(
    "gated",
    [
        clamped,
        lambda gate, up: F.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5),
        lambda gate, up: F.silu(gate) * (up + 2.5),
        lambda gate, up: torch.sigmoid(1.702 * gate) * gate * up,
    ],
    ids=["all", "clamped", "shifted", "quick_gelu"],
)
def test_rewrites_clamped_and_shifted_gates(parts: object, gated: object) -> None:
    gm = trace(lambda x: gated(*parts(x)), x=GATE_UP)  # type: ignore[operator]
    fused, (report,) = apply(gm, fuse_act_mul())
    assert report.added == {"llmc.act_mul.default": 1}
    assert set(ops(fused)) == {"llmc.act_mul.default"}
    assert_same(fused, gm, Values.of(x=GATE_UP), 1e-6)


OTHERS = {
    "other limits": lambda a, b: F.silu(a.clamp(max=0.5)) * b.clamp(-0.4, 0.5),
    "a gate with a lower bound": lambda a, b: F.silu(a.clamp(-0.5, 0.5)) * b.clamp(-0.5, 0.5),
    "one of them clamped": lambda a, b: F.silu(a) * b.clamp(-0.5, 0.5),
    "another factor": lambda a, b: a * torch.sigmoid(1.5 * a) * b,
    "the sigmoid of another value": lambda a, b: a * torch.sigmoid(1.702 * b) * b,
    "the clamped activation": lambda a, b: F.silu(a).clamp(max=0.5) * b.clamp(-0.5, 0.5),
    "the sum of two": lambda a, b: F.silu(a) * (b + a),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_leaves_alone_what_the_op_does_not_compute(kind: str) -> None:
    gm = trace(lambda x: OTHERS[kind](*split(x)), x=GATE_UP)
    _, (report,) = apply(gm, fuse_act_mul())
    assert not report.added and not report.removed


SLICES = {
    "odd gates": lambda x: (x[..., 1::2], x[..., ::2]),
    "steps of 4": lambda x: (x[..., ::4], x[..., 1::4]),
    "not all": lambda x: (x[..., :8:2], x[..., 1:8:2]),
    "both even": lambda x: (x[..., ::2], x[..., ::2]),
    "of two tensors": lambda x: (x[..., ::2], (x * 2)[..., 1::2]),
    "rows": lambda x: (x[:, ::2, :], x[:, 1::2, :]),
}


@pytest.mark.parametrize("kind", SLICES)
def test_leaves_alone_other_slices(kind: str) -> None:
    def gated(x: Tensor) -> Tensor:
        gate, up = SLICES[kind](x)
        return F.silu(gate) * up

    square = step(torch.randn(1, 16, 16), dynamic=None)
    _, (report,) = apply(trace(gated, x=square), fuse_act_mul())
    assert not report.added and not report.removed


@pytest.mark.parametrize(
    "square", [torch.square, lambda x: x * x, lambda x: x**2], ids=["square", "product", "power"]
)
def test_rewrites_a_squared_relu(square: Callable[[Tensor], Tensor]) -> None:
    gm = trace(lambda x: square(F.relu(x)), x=GATE_UP)
    fused, (report,) = apply(gm, fuse_act_mul())
    assert report.added == {"llmc.activate.default": 1}
    assert_same(fused, gm, Values.of(x=GATE_UP), 1e-6)


def test_leaves_alone_another_power_of_a_relu() -> None:
    _, (report,) = apply(trace(lambda x: F.relu(x) ** 3, x=GATE_UP), fuse_act_mul())
    assert not report.added
