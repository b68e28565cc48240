"""`canonicalize`: one spelling for what models write in many, and no op that does nothing.

First in the list: the other passes match on its output.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx

from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, calls, emit, replace, same_shape, val
from llmc.passes.inputs import WeightInput, add_input, input_of

_PASS_THROUGH = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
_CASTS = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default)


@graph_pass(required=True)
def canonicalize(gm: fx.GraphModule) -> Notes:
    """Drop ops that do nothing and spell a transposed linear as a linear.

    Before:
        b = aten.dropout(a, 0.1, False);  c = aten.to(b, dtype of b);  d = aten.slice(c, 1, 0, MAX)
        y = aten.addmm(bias, d, w)
    After:
        y = aten.linear(a, w transposed at load, bias)
    """
    graph = gm.graph
    for node in calls(graph, aten.type_as.default):
        with graph.inserting_before(node):
            cast = emit(graph, aten.to.dtype, node.args[0], val(node).dtype)
        replace(node, cast)
    for node in list(graph.nodes):
        if node.op == "call_function" and _does_nothing(node):
            replace(node, node.args[0])
    for node in calls(graph, aten.cat.default):
        _drop_empty_parts(node)
    for node in calls(graph, aten.addmm.default):
        _addmm_to_linear(graph, node)
    return []


def _does_nothing(node: fx.Node) -> bool:
    if node.target is aten.dropout.default:
        return bool(node.args[1] == 0 or not node.args[2])
    if node.target in _PASS_THROUGH:
        return True
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return False
    if node.target in _CASTS:
        same = val(node).dtype == val(source).dtype and val(node).layout == val(source).layout
        return same and not node.kwargs.get("copy", False)
    if node.target is aten.slice.Tensor:
        start, end, step = _slice_bounds(node)
        return start in (0, None) and step == 1 and (end is None or end == sys.maxsize)
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor):
        factor = node.args[1]
        plain = isinstance(factor, int | float) and factor == 1
        return plain and val(node).dtype == val(source).dtype
    if node.target in (aten.view.default, aten.reshape.default, aten.expand.default):
        return same_shape(node, source)
    return False


def _drop_empty_parts(node: fx.Node) -> None:
    """cat((a, b), dim) where b has no element along dim is a."""
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(parts, list | tuple) and isinstance(dim, int)
    kept = [p for p in parts if isinstance(p, fx.Node) and str(val(p).shape[dim]) != "0"]
    if len(kept) == 1 and len(kept) < len(parts) and val(kept[0]).dtype == val(node).dtype:
        replace(node, kept[0])


def _slice_bounds(node: fx.Node) -> tuple[Any, Any, Any]:
    args = [*node.args, *([None] * (5 - len(node.args)))]
    return args[2], args[3], 1 if args[4] is None else args[4]


def _addmm_to_linear(graph: fx.Graph, node: fx.Node) -> None:
    """addmm(bias, x, w) with w [in, out] a parameter: the linear of its transpose."""
    bias, x, weight = node.args[:3]
    role = input_of(weight)
    if not isinstance(role, WeightInput) or role.transposed or node.kwargs:
        return
    if not isinstance(bias, fx.Node) or val(bias).dim() != 1 or not isinstance(weight, fx.Node):
        return
    turned = _transposed_input(graph, weight, role)
    with graph.inserting_before(node):
        linear = emit(graph, aten.linear.default, x, turned, bias)
    replace(node, linear)


def _transposed_input(graph: fx.Graph, weight: fx.Node, role: WeightInput) -> fx.Node:
    wanted = WeightInput(parts=role.parts, transposed=True)
    node: fx.Node
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["input"] == wanted:
            return node
    shape = val(weight)
    return add_input(
        graph, f"{weight.name}_t", wanted, shape.new_empty(shape.shape[1], shape.shape[0])
    )
