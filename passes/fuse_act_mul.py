"""`fuse_act_mul`: fuse a gated activation, so that it reads the merged projection once, and a
squared ReLU."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.kernels.act_mul import QUICK, act_mul, activate
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    is_call,
    operands,
    replace,
    same_shape,
    val,
)


@graph_pass()
def fuse_act_mul(gm: fx.GraphModule) -> Notes:
    """Fuse activation and gate over the two halves of one tensor, or over its even and odd
    elements. Both may be clamped, and a number added to what the gate multiplies. The square of a
    ReLU becomes one op, with a gate or without.

    Before:
        gate, up = aten.split_with_sizes(gate_up, [n, n], -1)
        y = aten.mul(aten.silu(aten.clamp(gate, None, 7.0)), aten.clamp(up, -7.0, 7.0))
    After:
        y = llmc.act_mul(gate_up, "silu", 7.0, 0.0, False)

    Of more parts, the two are first cut out together.

    Before:
        y = aten.square(aten.relu(x))
    After:
        y = llmc.activate(x, "relu2")
    """
    graph = gm.graph
    for node in calls(graph, aten.square.default, aten.pow.Tensor_Scalar, aten.mul.Tensor):
        relu = _squared(node)
        if is_call(relu, aten.relu.default):
            with graph.inserting_before(node):
                fused = emit(graph, activate.overload, arguments(relu).self, "relu2")
            replace(node, fused)
    for node in calls(graph, aten.mul.Tensor):
        for activated, up in operands(node):
            given = _gated(activated, up)
            if given is not None:
                pair, *how = given
                with graph.inserting_before(node):
                    source = pair.source
                    if pair.start is not None:
                        end = pair.start + 2 * val(node).shape[-1]
                        source = emit(graph, aten.slice.Tensor, source, -1, pair.start, end)
                    fused = emit(graph, act_mul.overload, source, *how)
                replace(node, fused)
                break
    return []


@dataclass(frozen=True, slots=True)
class _Pair:
    """Gates, and what they multiply, as one tensor."""

    source: fx.Node
    is_interleaved: bool = False  # even and odd elements, otherwise first and second half
    start: int | None = None  # of the first half, if `source` has other parts beside the two


def _gated(activated: Any, up: Any) -> tuple[_Pair, str, float | None, float, bool] | None:
    """The arguments of `act_mul` that give activated * up."""
    act, gate = activation(activated)
    if act is None:
        return None
    up, shift = _shifted(up)
    gate, limits = _clamped(gate)
    up, others = _clamped(up)
    limit = limits[1]
    if limit is None:
        fits = limits == others == (None, None)
    else:
        fits = limits == (None, limit) and others == (-limit, limit)
    pair = _pair(gate, up) if fits else None
    return None if pair is None else (pair, act, limit, shift, pair.is_interleaved)


def activation(node: Any) -> tuple[str | None, Any]:
    """(act, its argument) of an activation of `act_mul`; (None, None) of other values."""
    if is_call(node, activate.overload):
        return node.args[1], node.args[0]
    if is_call(node, aten.silu.default, aten.relu.default):
        return node.target.overloadpacket.__name__, node.args[0]
    if is_call(node, aten.gelu.default):
        kinds = {"none": "gelu", "tanh": "gelu_tanh"}
        return kinds.get(node.kwargs.get("approximate", "none")), node.args[0]
    if is_call(node, aten.mul.Tensor):
        for x, share in operands(node):
            scaled: Any = arguments(share).self if is_call(share, aten.sigmoid.default) else None
            if is_call(scaled, aten.mul.Tensor) and tuple(scaled.args) == (x, QUICK):
                return "quick_gelu", x
    return None, None


def _squared(node: fx.Node) -> Any:
    """x, if a value is its square."""
    if is_call(node, aten.mul.Tensor):
        a, b = node.args[:2]
        return a if a is b else None
    is_square = is_call(node, aten.square.default) or arguments(node).exponent == 2
    return node.args[0] if is_square else None


def _shifted(node: Any) -> tuple[Any, float]:
    """(x, number) of their sum; 0 for other values."""
    if is_call(node, aten.add.Tensor) and not node.kwargs and isinstance(node.args[1], int | float):
        return node.args[0], float(node.args[1])
    return node, 0.0


def _clamped(node: Any) -> tuple[Any, tuple[Any, Any]]:
    """(x, (lower, upper bound)) of a value that is clamped."""
    if not is_call(node, aten.clamp.default):
        return node, (None, None)
    given = arguments(node)
    return given.self, (given.min, given.max)


def _pair(gate: Any, up: Any) -> _Pair | None:
    """The tensor of which `gate` and `up` are neighbouring parts of the last dimension, or the even
    and the odd elements."""
    if is_call(gate, aten.slice.Tensor) and is_call(up, aten.slice.Tensor):
        even, odd = arguments(gate), arguments(up)
        source: fx.Node = even.self
        last, width = val(source).dim() - 1, val(source).shape[-1]
        is_pair = odd.self is source and isinstance(width, int) and width % 2 == 0
        for part, start in ((even, 0), (odd, 1)):
            is_pair = is_pair and part.dim in (-1, last) and (part.start or 0) == start
            is_pair = is_pair and part.step == 2 and (part.end is None or part.end >= width)
        return _Pair(source, is_interleaved=True) if is_pair else None
    return _neighbours(gate, up)


def _neighbours(gate: Any, up: Any) -> _Pair | None:
    if not (is_call(gate, operator.getitem) and is_call(up, operator.getitem)):
        return None
    first, second = arguments(gate), arguments(up)
    split = first.source
    if second.source is not split or second.index != first.index + 1:
        return None
    if not is_call(split, aten.split_with_sizes.default, aten.chunk.default):
        return None
    given = arguments(split)
    source: fx.Node = given.self
    if given.dim not in (-1, val(source).dim() - 1) or not same_shape(gate, up):
        return None
    sizes = [part.shape[-1] for part in val(split)]
    if len(sizes) == 2:
        return _Pair(source)
    known = all(isinstance(size, int) for size in sizes)
    return _Pair(source, start=sum(sizes[: first.index])) if known else None
