"""fuse_linears: the norm before a linear, the activation or residual sum after it, in one op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Arg, Values, apply, assert_idempotent, assert_same, ops, step, trace, weight
from torch import Tensor

from llmc.kernels.act_mul import act_mul, activate
from llmc.kernels.fused_linear import add_linear, fused_linear, norm_add_linear
from llmc.kernels.gated_rms_norm import gated_rms_norm
from llmc.kernels.layer_norm import add_layer_norm, layer_norm
from llmc.kernels.rms_norm import add_rms_norm, norm_add, norm_add_norm, rms_norm
from llmc.passes.edit import arguments, aten, calls, is_call, val
from llmc.passes.fuse_linears import fuse_linears
from llmc.passes.quantize_linears import quantize_linears
from llmc.passes.round_activations import round_activations

GEN = torch.Generator().manual_seed(0)
FUSED = "llmc.fused_linear.default"
FUSED_LOW = "llmc.fused_quantized_linear.default"
ADDED = "llmc.add_linear.default"
SUMMED = "llmc.norm_add_linear.default"
SUMMED_LOW = "llmc.norm_add_quantized_linear.default"


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GEN)


INPUTS: dict[str, Arg] = {
    "x": step(rand(1, 5, 16), dynamic=1),
    "wide": weight("wide", rand(48, 16)),
    "back": weight("back", rand(16, 24)),
    "gain": weight("gain", rand(16)),
    "bias": weight("bias", rand(48)),
}
VALUES = Values.of(**INPUTS)
SQUARE = weight("square", rand(16, 16))


def block(x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, bias: Tensor) -> list[Tensor]:
    """Norm, gated linears, residual sum, and the norm of the next block."""
    return between(x, wide, back, gain, bias, wide)


def between(
    x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, bias: Tensor, last: Tensor
) -> list[Tensor]:
    y = F.linear(rms_norm.overload(x, gain, 1e-6, 0.0), wide, bias)
    y = F.linear(act_mul.overload(y, "silu"), back)
    normed, total = add_rms_norm.overload(y, x, gain, 1e-5, 1.0)
    return [F.linear(normed, last), total]


def test_rewrites_a_block() -> None:
    gm = trace(block, **INPUTS)
    fused, (report,) = apply(gm, fuse_linears())
    assert ops(fused) == {FUSED: 3}
    assert report.removed["aten.linear.default"] == 3 and report.added == {FUSED: 3}
    assert_same(fused, gm, VALUES)
    assert_idempotent(gm, fuse_linears())


def test_takes_a_layer_norm() -> None:
    def centered(x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, bias: Tensor) -> list[Tensor]:
        shift = bias[:16]
        y = F.linear(layer_norm.overload(x, gain, shift, 1e-6), wide, bias)
        y = F.linear(act_mul.overload(y, "silu"), back)
        normed, total = add_layer_norm.overload(y, x, gain, None, 1e-5)
        return [F.linear(normed, wide), total]

    gm = trace(centered, **INPUTS)
    fused, _ = apply(gm, fuse_linears())
    assert {k: v for k, v in ops(fused).items() if "llmc" in k} == {FUSED: 3}
    first, _, last = (arguments(node) for node in calls(fused.graph, fused_linear.overload))
    assert first.centered and last.centered and last.norm_bias is None
    assert_same(fused, gm, VALUES)
    assert_idempotent(gm, fuse_linears())


QUANTIZED: dict[str, Arg] = {
    "x": step(rand(1, 5, 64), dynamic=1),
    "wide": weight("wide", rand(64, 64) / 8),
    "back": weight("back", rand(64, 32) / 8),
    "gain": weight("gain", rand(64)),
    "bias": weight("bias", rand(64)),
    "last": weight("last", rand(32, 64) / 8),
}


@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
def test_rewrites_a_quantized_block(format: Any) -> None:
    gm, _ = apply(trace(between, **QUANTIZED), quantize_linears(format=format))
    fused, (report,) = apply(gm, fuse_linears())
    assert ops(fused) == {FUSED_LOW: 3} == report.added
    assert_same(fused, gm, Values.of(**QUANTIZED))
    assert_idempotent(gm, fuse_linears())


def test_inputs_that_are_rounded_are_rounded_apart() -> None:
    gm, _ = apply(trace(between, **QUANTIZED), quantize_linears(format="fp8"))
    gm, _ = apply(gm, round_activations(bits=None, float8=True))
    fused, (report,) = apply(gm, fuse_linears())
    assert not report.changed and ops(fused) == ops(gm)


def test_gates_that_share_blocks_with_others_are_multiplied_apart() -> None:
    """Here, half of the channels are one and a half blocks of 16."""
    given = {**QUANTIZED, "wide": weight("wide", rand(48, 64)), "bias": weight("bias", rand(48))}
    given["back"] = weight("back", rand(64, 24))
    gm, _ = apply(trace(between, **given), quantize_linears(format="int8"))
    fused, _ = apply(gm, fuse_linears())
    assert ops(fused)["llmc.act_mul.default"] == 1 and ops(fused)[FUSED_LOW] == 2
    assert_same(fused, gm, Values.of(**given))


GATED: dict[str, Arg] = {
    "x": step(rand(5, 4, 6), dynamic=0),  # as a recurrent op returns it
    "hidden": step(rand(1, 5, 16), dynamic=1),
    "gates": step(rand(1, 5, 40), dynamic=1),
    "gain": weight("gain", rand(6)),
    "wide_gain": weight("wide_gain", rand(24)),
    "back": weight("back", rand(16, 24)),
}


def by_head(x: Tensor, hidden: Tensor, gates: Tensor, gain: Tensor, *weights: Tensor) -> Tensor:
    """Tokens and heads in one dimension, as some models write it."""
    z = gates[..., :24].reshape(-1, 6)
    y = gated_rms_norm.overload(x.reshape(-1, 6), z, gain, 1e-5, 0.0, "silu", False, 6, x.dtype)
    return hidden + F.linear(y.reshape(1, -1, 4, 6).reshape(1, -1, 24), weights[1])


def by_group(
    x: Tensor, hidden: Tensor, gates: Tensor, gain: Tensor, wide_gain: Tensor, back: Tensor
) -> Tensor:
    """Two groups of channels, and a sum in place."""
    rows, z = x.reshape(1, -1, 24), gates[..., 16:]
    y = gated_rms_norm.overload(rows, z, wide_gain, 1e-5, 1.0, "sigmoid", True, 12, x.dtype)
    return hidden * 2 + F.linear(y, back)


@pytest.mark.parametrize(
    ("layer", "fused_op", "group"), [(by_head, FUSED, 6), (by_group, ADDED, 12)]
)
def test_takes_a_gated_norm(layer: Callable[..., Tensor], fused_op: str, group: int) -> None:
    gm = trace(layer, **GATED)
    fused, _ = apply(gm, fuse_linears())
    left = {name: n for name, n in ops(fused).items() if name.startswith("llmc.")}
    assert left == {fused_op: 1}
    (node,) = calls(fused.graph, fused_linear.overload, add_linear.overload)
    given = arguments(node)
    assert (given.group, given.gate_first) == (group, layer is by_group)
    assert given.x.args[0].op == "placeholder"
    # a view of the gates: heads are not merged with tokens, which would copy them
    assert is_call(given.gate.args[0], aten.slice.Tensor) and val(given.gate).shape[-1] == 24
    assert val(given.norm_weight).shape == (24,)
    assert_same(fused, gm, Values.of(**GATED))
    assert_idempotent(gm, fuse_linears())


ELSEWHERE: dict[str, Callable[..., list[Tensor]]] = {
    "is read elsewhere": lambda y, back: [F.linear(y.reshape(1, -1, 24), back), y],
    "is read elsewhere in its last shape": lambda y, back: [
        F.linear(rows := y.reshape(1, -1, 24), back),
        rows,
    ],
    "is cut into other rows": lambda y, back: [F.linear(y.reshape(1, -1, 4), back[:, :4])],
    "is in another order": lambda y, back: [F.linear(y.reshape(1, -1, 24).flip(-1), back)],
    "has another norm after it": lambda y, back: [
        F.linear(rms_norm.overload(y.reshape(1, -1, 24), None, 1e-6, 0.0), back)
    ],
    "has a computed weight": lambda y, back: [F.linear(y.reshape(1, -1, 24), back)],
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_leaves_alone_a_gated_norm_that(kind: str) -> None:
    def layer(
        x: Tensor, hidden: Tensor, gates: Tensor, gain: Tensor, *rest: Tensor
    ) -> list[Tensor]:
        gain = gain * 2 if "computed" in kind else gain
        z = gates[..., :24].reshape(1, -1, 4, 6)
        y = gated_rms_norm.overload(x[None], z, gain, 1e-5, 0.0, "silu", False, 6, x.dtype)
        return ELSEWHERE[kind](y, rest[1])

    fused, _ = apply(trace(layer, **GATED), fuse_linears())
    assert ops(fused)["llmc.gated_rms_norm.default"] == 1
    assert all(arguments(node).gate is None for node in calls(fused.graph, fused_linear.overload))


def test_takes_a_plain_sum_with_the_residual_on_either_side() -> None:
    def sums(x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, bias: Tensor) -> list[Tensor]:
        y = F.linear(x, wide)[..., :24]
        return [x + F.linear(y, back), F.linear(y, back) + x]

    gm = trace(sums, **INPUTS)
    fused, _ = apply(gm, fuse_linears())
    assert ops(fused)[FUSED] == 2 and ops(fused)["aten.linear.default"] == 1
    assert_same(fused, gm, VALUES)


def test_leaves_alone_what_is_read_elsewhere() -> None:
    def shared(x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, bias: Tensor) -> list[Tensor]:
        normed = rms_norm.overload(x, gain, 1e-6, 0.0)
        y = F.linear(normed, wide)
        down = F.linear(y[..., :24], back)
        return [act_mul.overload(y, "silu"), normed, down + x, down]

    gm = trace(shared, **INPUTS)
    same, (report,) = apply(gm, fuse_linears())
    assert not report.added and ops(same) == ops(gm)


def test_adds_to_a_residual_in_float32() -> None:
    """As in Mamba, whose norms read it in bfloat16."""
    inputs = {name: replace(arg, tensor=arg.tensor.bfloat16() / 4) for name, arg in INPUTS.items()}

    def layers(x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, bias: Tensor) -> list[Tensor]:
        total = x.float() * 2
        for _ in range(2):
            y = F.linear(rms_norm.overload(total.bfloat16(), gain, 1e-6, 0.0), wide, bias)
            total = F.linear(y[..., :24], back) + total
        return [total.sin()]

    gm = trace(layers, **inputs)
    fused, _ = apply(gm, fuse_linears())
    found = ops(fused)
    assert found[ADDED] == found[FUSED] == 2 and found["aten.to.dtype"] == 1
    assert_same(fused, gm, Values.of(**inputs), 0.1)
    assert_idempotent(gm, fuse_linears())


def test_two_linears_take_the_norm_that_both_read() -> None:
    def shared(x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, bias: Tensor) -> list[Tensor]:
        normed = rms_norm.overload(x, gain, 1e-6, 0.0)
        return [F.linear(normed, wide), F.linear(normed, wide, bias)]

    gm = trace(shared, **INPUTS)
    fused, _ = apply(gm, fuse_linears())
    assert ops(fused) == {FUSED: 2}
    assert_same(fused, gm, VALUES)
    assert_idempotent(gm, fuse_linears())


def test_leaves_alone_a_norm_that_is_also_added() -> None:
    """As in a layer that normalizes the residual stream itself."""

    def post(x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, bias: Tensor) -> list[Tensor]:
        normed = rms_norm.overload(x, gain, 1e-6, 0.0)
        return [normed + F.linear(F.linear(normed, wide)[..., :24], back)]

    gm = trace(post, **INPUTS)
    fused, _ = apply(gm, fuse_linears())
    assert ops(fused)["llmc.rms_norm.default"] == 1
    assert_same(fused, gm, VALUES)


UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "relu2": lambda y: activate.overload(y, "relu2"),
}


def without_gates(act: str) -> Callable[..., Tensor]:
    """A feed-forward block whose activation has no gate."""

    def feed_forward(x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, *rest: Tensor) -> Tensor:
        y = UNGATED[act](F.linear(rms_norm.overload(x, gain, 1e-6, 0.0), wide, *rest[:1]))
        return x + F.linear(y[..., : back.shape[1]], back)

    return feed_forward


@pytest.mark.parametrize("act", UNGATED)
def test_takes_an_activation_without_gates(act: str) -> None:
    gm = trace(without_gates(act), **INPUTS)
    fused, (report,) = apply(gm, fuse_linears())
    assert report.added == {FUSED: 2}
    first, second = (arguments(node) for node in calls(fused.graph, fused_linear.overload))
    assert (first.act, first.gated, first.eps) == (act, False, 1e-6) and second.act is None
    assert_same(fused, gm, VALUES)
    assert_idempotent(gm, fuse_linears())


@pytest.mark.parametrize("channels", [64, 48])
def test_takes_an_activation_without_gates_of_quantized_weights(channels: int) -> None:
    given = {**QUANTIZED, "wide": weight("wide", rand(channels, 64) / 8)}
    given["bias"] = weight("bias", rand(channels))
    gm, _ = apply(trace(without_gates("relu"), **given), quantize_linears(format="int8"))
    fused, (report,) = apply(gm, fuse_linears())
    assert report.added == {FUSED_LOW: 2}
    assert_same(fused, gm, Values.of(**given))


def test_leaves_alone_an_activation_of_what_is_read_elsewhere() -> None:
    def shared(x: Tensor, wide: Tensor, *rest: Tensor) -> list[Tensor]:
        y = F.linear(x, wide)
        return [F.relu(y), y]

    _, (report,) = apply(trace(shared, **INPUTS), fuse_linears())
    assert not report.added


@pytest.mark.parametrize("others", [(0.5,), (None, 1.0), (None, 0.0, True)], ids=str)
def test_leaves_alone_an_activation_that_is_not_plain(others: tuple[object, ...]) -> None:
    def gated(x: Tensor, wide: Tensor, *rest: Tensor) -> Tensor:
        return act_mul.overload(F.linear(x, wide), "silu", *others)

    _, (report,) = apply(trace(gated, **INPUTS), fuse_linears())
    assert not report.added


def test_leaves_alone_a_sum_of_another_shape() -> None:
    def broadcast(x: Tensor, wide: Tensor, *rest: Tensor) -> Tensor:
        return F.linear(x, wide) + rest[-1]

    _, (report,) = apply(trace(broadcast, **INPUTS), fuse_linears())
    assert not report.added


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_adds_two_linears_in_turn(first: bool, normed: bool) -> None:
    """Attention and feed-forward blocks in parallel."""

    def parallel(
        x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, *rest: Tensor
    ) -> list[Tensor]:
        made = x * 2
        y = F.linear(made, wide)
        both = F.linear(y[..., :24], back) + F.linear(y[..., 24:], back)
        if not normed:
            return [(both + made if first else made + both).sin()]
        sum_of = (both, made) if first else (made, both)
        return [F.linear(t, wide) for t in add_layer_norm.overload(*sum_of, gain, None, 1e-5)]

    gm = trace(parallel, **INPUTS)
    fused, _ = apply(gm, fuse_linears())
    assert ops(fused)[ADDED] == 2 and "aten.add.Tensor" not in ops(fused)
    assert_same(fused, gm, VALUES, 1e-4)  # float32 sums in another order
    assert_idempotent(gm, fuse_linears())


def test_leaves_together_a_sum_that_is_read_elsewhere() -> None:
    def parallel(x: Tensor, wide: Tensor, back: Tensor, *rest: Tensor) -> list[Tensor]:
        y = F.linear(x, wide)
        both = F.linear(y[..., :24], back) + F.linear(y[..., 24:], back)
        return [both + x * 2, both]

    gm = trace(parallel, **INPUTS)
    fused, _ = apply(gm, fuse_linears())
    assert ops(fused)["aten.add.Tensor"] == 1
    assert_same(fused, gm, VALUES, 1e-5)


def test_rests_where_it_is_unwanted() -> None:
    _, (report,) = apply(trace(block, **INPUTS), fuse_linears(unwanted="no GPU"))
    assert not report.added and report.notes == ("no GPU",)


def test_adds_in_place_to_what_nothing_reads_later() -> None:
    """The sum of one layer is the residual of the next, in the memory of the first."""

    def layers(x: Tensor, wide: Tensor, back: Tensor, *rest: Tensor) -> list[Tensor]:
        made = x * 2
        for _ in range(3):
            made = made + F.linear(F.linear(made, wide)[..., :24], back)
        return [made.sum(-1), made]

    gm = trace(layers, **INPUTS)
    fused, _ = apply(gm, fuse_linears())
    assert ops(fused)[ADDED] == 3 and FUSED not in ops(fused)
    assert_same(fused, gm, VALUES)
    assert_idempotent(gm, fuse_linears())


READ_LATER: dict[str, Callable[[Tensor, Tensor, Tensor], list[Tensor]]] = {
    "itself": lambda made, view, down: [made + down, made],
    "by another op": lambda made, view, down: [(made + down) * made],
    "through an earlier view": lambda made, view, down: [(made + down) * view[..., :1]],
    "a view whose source is read later": lambda made, view, down: [view + down, made],
}


@pytest.mark.parametrize("kind", READ_LATER)
def test_adds_to_a_new_tensor_where_the_residual_is_read_later(kind: str) -> None:
    def layer(x: Tensor, wide: Tensor, back: Tensor, *rest: Tensor) -> list[Tensor]:
        made = x * 2
        view = made.view(-1, 16).view(made.shape)
        return READ_LATER[kind](made, view, F.linear(F.linear(made, wide)[..., :24], back))

    gm = trace(layer, **INPUTS)
    fused, _ = apply(gm, fuse_linears())
    assert ops(fused)[FUSED] == 1 and ADDED not in ops(fused)
    assert_same(fused, gm, VALUES)


OTHERS_MEMORY: dict[str, Callable[..., Tensor]] = {
    "an input": lambda x, square: x + F.linear(x * 2, square),
    "a view of an input": lambda x, square: x[:, :] + F.linear(x * 2, square),
    "a row for all": lambda x, square: (x[:, :1] * 2).expand(x.shape) + F.linear(x * 3, square),
    "the linear's own input": lambda x, square: (made := x * 2) + F.linear(made, square),
}


@pytest.mark.parametrize("kind", OTHERS_MEMORY)
def test_never_writes_to_memory_that_others_use(kind: str) -> None:
    gm = trace(lambda x, square: OTHERS_MEMORY[kind](x, square), x=INPUTS["x"], square=SQUARE)
    fused, _ = apply(gm, fuse_linears())
    assert ops(fused)[FUSED] == 1 and ADDED not in ops(fused)
    assert_same(fused, gm, Values.of(x=INPUTS["x"], square=SQUARE))


SANDWICH: dict[str, Arg] = {
    **QUANTIZED,
    "next": weight("next", rand(64, 64) / 8),
    "next_back": weight("next_back", rand(64, 32) / 8),
}


def sandwich(
    x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, bias: Tensor, *others: Tensor
) -> list[Tensor]:
    """Norms after the blocks; before the first of two linears, another of the sum."""
    last, after, after_back = others
    y = F.linear(act_mul.overload(F.linear(x, wide), "silu"), back)
    normed, total = norm_add_norm.overload(y, x, gain, 1e-6, 1.0, None, 1e-5, 0.0)
    y = F.linear(act_mul.overload(F.linear(normed, after, bias), "gelu"), after_back)
    total = norm_add.overload(y, total, gain, 1e-6, 0.0)
    return [F.linear(total, last), total]


def test_a_linear_takes_a_sum_with_a_norm_in_it() -> None:
    gm = trace(sandwich, **SANDWICH)
    fused, (report,) = apply(gm, fuse_linears())
    assert report.added.items() >= {FUSED: 1, SUMMED: 2}.items()
    first, last = (arguments(node) for node in calls(fused.graph, norm_add_linear.overload))
    assert (first.act, first.x_offset, first.eps) == ("gelu", 1.0, 1e-5)
    assert (last.act, last.x_offset, last.eps) == (None, 0.0, None)
    assert_same(fused, gm, Values.of(**SANDWICH))
    assert_idempotent(gm, fuse_linears())


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_a_quantized_linear_takes_a_sum_with_a_norm_in_it(format: Any) -> None:
    gm, _ = apply(trace(sandwich, **SANDWICH), quantize_linears(format=format))
    fused, _ = apply(gm, fuse_linears())
    assert ops(fused)[SUMMED_LOW] == 2
    assert_same(fused, gm, Values.of(**SANDWICH))
    assert_idempotent(gm, fuse_linears())


def test_leaves_alone_a_sum_that_two_linears_read() -> None:
    """Each would store it."""

    def apart(x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, *rest: Tensor) -> list[Tensor]:
        total = norm_add.overload(x, x, gain, 1e-6, 0.0)
        return [F.linear(total, wide), F.linear(total, rest[-1])]

    given = {**INPUTS, "square": SQUARE}
    gm = trace(apart, **given)
    fused, (report,) = apply(gm, fuse_linears())
    assert not report.changed


def test_leaves_alone_a_sum_before_a_weight_that_is_computed_later() -> None:
    def tied(x: Tensor, wide: Tensor, back: Tensor, gain: Tensor, *rest: Tensor) -> Tensor:
        total = norm_add.overload(x, x, gain, 1e-6, 0.0)
        return F.linear(total, wide * 2)

    _, (report,) = apply(trace(tied, **INPUTS), fuse_linears())
    assert not report.changed
