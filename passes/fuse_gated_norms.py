"""`fuse_gated_norms`: an RMSNorm before or after a gate becomes one op."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.kernels.gated_rms_norm import gated_rms_norm
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    CASTS,
    arguments,
    aten,
    calls,
    emit,
    is_call,
    keeps_order,
    only_user,
    operands,
    replace,
    reshaped,
    same_shape,
    source_of,
    through,
    through_reshapes,
    val,
)
from llmc.passes.fuse_norms import normalized, weight_of

_GATES = {aten.silu.default: "silu", aten.sigmoid.default: "sigmoid"}


@dataclass(frozen=True, slots=True)
class _Gate:
    x: fx.Node  # the other factor
    gate: fx.Node  # before its activation
    act: str
    product: fx.Node


@graph_pass()
def fuse_gated_norms(gm: fx.GraphModule) -> Notes:
    """Fuse RMSNorm with the gate before or after it, as in recurrent layers.

    Before:
        h = aten.mul(x, aten.silu(gate))
        r = aten.rsqrt(aten.add(aten.mean(aten.pow(aten.view(h, groups), 2), [-1], True), eps))
        y = aten.mul(weight, aten.mul(aten.view(h, groups), r))
        z = aten.mul(weight, aten.mul(x, aten.rsqrt(...)));  u = aten.mul(z, aten.silu(gate))
    After:
        y = llmc.gated_rms_norm(x, gate, weight, eps, 0.0, "silu", True, group, dtype of y)
        u = llmc.gated_rms_norm(x, gate, weight, eps, 0.0, "silu", False, group, dtype of u)
    """
    for rsqrt in calls(gm.graph, aten.rsqrt.default, aten.pow.Tensor_Scalar):
        found = normalized(rsqrt)
        if found is not None:
            _fuse(gm.graph, *found)
    return []


def _fuse(graph: fx.Graph, x32: fx.Node, scaled: fx.Node, eps: float) -> None:
    group = val(x32).shape[-1]
    before = _gate_of(source_of(x32))
    last = node = scaled
    weight: tuple[fx.Node, float] | None = None
    after: _Gate | None = None
    while (user := only_user(node)) is not None:
        if is_call(user, aten.mul.Tensor) and (gate := _gate_of(user, by=node)) is not None:
            if before is not None or after is not None:
                break
            after, last = gate, user
        elif is_call(user, aten.mul.Tensor) and weight is None and after is None:
            weight = _weight(user, node)
            if weight is None:
                break
            last = user
        elif is_call(user, *CASTS):
            last = user
        elif not keeps_order(user):
            break
        node = user
    found = before or after
    if found is None or not isinstance(group, int):
        return
    x = x32 if before is None else before.x
    _emit(graph, found, x, weight, eps, group, last, gate_first=before is not None)


def _gate_of(product: Any, by: fx.Node | None = None) -> _Gate | None:
    """The gate of a product act(gate) * x, of two values of one shape; `by` is x if given."""
    if not is_call(product, aten.mul.Tensor):
        return None
    for other, x in operands(product):
        activated = through(other, *CASTS)
        if not is_call(activated, *_GATES) or (by is not None and x is not by):
            continue
        if isinstance(x, fx.Node) and same_shape(other, x):
            return _Gate(x, arguments(activated).self, _GATES[activated.target], product)
    return None


def _weight(product: fx.Node, node: fx.Node) -> tuple[fx.Node, float] | None:
    """(parameter, offset) by which a product multiplies the last dimensions of `node`."""
    for mine, other in operands(product):
        if mine is not node or not isinstance(other, fx.Node):
            continue
        found = weight_of(through_reshapes(other))
        shape = list(val(other).shape)
        while shape and shape[0] == 1:
            shape = shape[1:]
        if found is not None and shape and list(val(product).shape[-len(shape) :]) == shape:
            return found
    return None


def _emit(
    graph: fx.Graph, found: _Gate, x: fx.Node, weight: tuple[fx.Node, float] | None, eps: float,
    group: int, last: fx.Node, *, gate_first: bool,
) -> None:  # fmt: skip
    width = val(found.product).shape[-1]
    if not isinstance(width, int) or width % group:
        return
    if weight is not None and math.prod(val(weight[0]).shape) != width:
        return
    # a reshape that merges heads with tokens would copy the gate
    gate = source_of(found.gate, width)
    with graph.inserting_before(last):
        fused = emit(
            graph,
            gated_rms_norm.overload,
            reshaped(graph, source_of(x, width), val(gate).shape),
            gate,
            None if weight is None else weight[0],
            eps,
            0.0 if weight is None else weight[1],
            found.act,
            gate_first,
            group,
            val(last).dtype,
        )
        out = reshaped(graph, fused, val(last).shape)
    replace(last, out)
