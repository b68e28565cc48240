"""`canonicalize`: one canonical form for what models write in many ways, and no no-op calls.

First in the pipeline: the other passes match on its output.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx

from llmc.passes.base import Notes, graph_pass, writes
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    is_call,
    only_user,
    replace,
    same_shape,
    val,
)
from llmc.passes.inputs import WeightInput, add_input, input_of, placeholder_of

_PASS_THROUGH = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
_TURNS = (aten.numpy_T.default, aten.t.default)
_VIEWS = (aten.view.default, aten.reshape.default)
_CASTS = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default)


@graph_pass(required=True)
def canonicalize(gm: fx.GraphModule) -> Notes:
    """Drop no-ops, write products with a weight as linears, and turn tensors that are filled part
    by part into concatenations.

    Before:
        b = aten.dropout(a, 0.1, False);  c = aten.to(b, dtype of b);  d = aten.slice(c, 1, 0, MAX)
        y = aten.addmm(bias, d, w)
        x = aten.matmul(d, aten.numpy_T(v))
        u = aten.view(aten.linear(aten.view(y, [-1, K]), v), [1, T, N])
        z = aten.new_empty(y, [T, 7])
        aten.copy_(aten.slice(z, 1, 0, 3), p);  aten.copy_(aten.slice(z, 1, 3, MAX), q)
    After:
        y = aten.linear(a, w transposed at load, bias)
        x = aten.linear(a, v)
        u = aten.linear(y, v)
        z = aten.cat((p, q), 1)
    """
    graph = gm.graph
    for node in calls(graph, aten.type_as.default):
        with graph.inserting_before(node):
            cast = emit(graph, aten.to.dtype, arguments(node).self, val(node).dtype)
        replace(node, cast)
    for node in list(graph.nodes):
        if node.op == "call_function" and _does_nothing(node):
            replace(node, node.args[0])
    for node in calls(graph, aten.new_empty.default):
        _join_parts(graph, node)
    for node in calls(graph, aten.cat.default):
        _drop_empty_parts(node)
    for node in calls(graph, aten.addmm.default):
        _addmm_to_linear(graph, node)
    for node in calls(graph, aten.matmul.default, aten.mm.default):
        _matmul_to_linear(graph, node)
    for node in calls(graph, aten.linear.default):
        _keep_shape(graph, node)
    return []


def _does_nothing(node: fx.Node) -> bool:
    if node.target is aten.dropout.default:
        given = arguments(node)
        return bool(given.p == 0 or not given.train)
    if node.target in _PASS_THROUGH:
        return True
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return False
    if node.target in _CASTS:
        same = val(node).dtype == val(source).dtype and val(node).layout == val(source).layout
        return same and not node.kwargs.get("copy", False)
    if node.target is aten.slice.Tensor:
        cut = arguments(node)
        return cut.start in (0, None) and cut.step in (1, None) and cut.end in (None, sys.maxsize)
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor):
        factor = arguments(node).other
        plain = isinstance(factor, int | float) and factor == 1
        return plain and val(node).dtype == val(source).dtype
    if node.target in (*_VIEWS, aten.expand.default):
        return same_shape(node, source)
    return False


def _drop_empty_parts(node: fx.Node) -> None:
    """cat((a, b), dim) is a if b is empty along dim, or torch.tensor([]) as in an empty cache."""
    given = arguments(node)
    kept = [
        part
        for part in given.tensors
        if tuple(val(part).shape) != (0,) and str(val(part).shape[given.dim]) != "0"
    ]
    if len(kept) == 1 and len(kept) < len(given.tensors) and val(kept[0]).dtype == val(node).dtype:
        replace(node, kept[0])


def _join_parts(graph: fx.Graph, empty: fx.Node) -> None:
    """Replace a new tensor by a cat if its slices along the last dimension are filled in order
    before anything else reads it."""
    last = val(empty).dim() - 1
    parts: list[fx.Node] = []
    cuts: list[fx.Node] = []
    fills: list[fx.Node] = []
    end = 0
    for cut in list(empty.users):  # in the order of the graph
        fill = only_user(cut) if is_call(cut, aten.slice.Tensor) else None
        if fill is None or not is_call(fill, aten.copy_.default) or fill.args[0] is not cut:
            break
        at, part = arguments(cut), arguments(fill).src
        if at.dim not in (-1, last) or (at.start or 0) != end or at.step != 1 or fill.users:
            return
        if not same_shape(cut, part) or val(part).dtype != val(empty).dtype:
            return
        end += int(val(cut).shape[-1])
        parts.append(part)
        cuts.append(cut)
        fills.append(fill)
    if not parts or end != val(empty).shape[-1]:
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    first, last_write = order[fills[0]], order[fills[-1]]
    if any(order[user] < last_write for user in empty.users if user not in cuts):
        return
    if any(writes(n) and first < order[n] < last_write for n in order if n not in fills):
        return  # it may write to a part
    with graph.inserting_after(fills[-1]):
        whole = emit(graph, aten.cat.default, parts, -1)
    for node in (*fills, *cuts):
        graph.erase_node(node)
    replace(empty, whole)


def _addmm_to_linear(graph: fx.Graph, node: fx.Node) -> None:
    """addmm(bias, x, w) with a parameter w [in, out] becomes a linear over its transpose."""
    given = arguments(node)
    role = input_of(given.mat2)
    if not isinstance(role, WeightInput) or role.transposed or node.kwargs:
        return
    if val(given.self).dim() != 1:
        return
    turned = _transposed_input(graph, given.mat2, role)
    with graph.inserting_before(node):
        linear = emit(graph, aten.linear.default, given.mat1, turned, given.self)
    replace(node, linear)


def _matmul_to_linear(graph: fx.Graph, node: fx.Node) -> None:
    """x @ w.T with a parameter w [out, in] becomes a linear."""
    source, turned = node.args[:2]
    if node.kwargs or not isinstance(turned, fx.Node) or not is_call(turned, *_TURNS):
        return
    weight = arguments(turned).self
    if not isinstance(input_of(weight), WeightInput) or val(weight).dim() != 2:
        return
    with graph.inserting_before(node):
        linear = emit(graph, aten.linear.default, source, weight)
    replace(node, linear)


def _keep_shape(graph: fx.Graph, node: fx.Node) -> None:
    """Multiply a value itself, not its rows as a matrix, if all readers restore its shape."""
    rows: Any
    rows, *others = node.args
    if not is_call(rows, *_VIEWS):
        return
    x = rows.args[0]
    (*lead, depth), width = val(x).shape, val(node).shape[-1]
    restored = [str(size) for size in (*lead, width)]
    if str(depth) != str(val(rows).shape[-1]) or not node.users:
        return
    for user in node.users:
        if not is_call(user, *_VIEWS) or [str(size) for size in val(user).shape] != restored:
            return
    with graph.inserting_before(node):
        linear = emit(graph, aten.linear.default, x, *others)
    for user in list(node.users):
        replace(user, linear)


def _transposed_input(graph: fx.Graph, weight: fx.Node, role: WeightInput) -> fx.Node:
    wanted = WeightInput(parts=role.parts, transposed=True)
    node = placeholder_of(graph, wanted)
    if node is not None:
        return node
    shape = val(weight)
    return add_input(
        graph, f"{weight.name}_t", wanted, shape.new_empty(shape.shape[1], shape.shape[0])
    )
