"""`fuse_linears`: a linear absorbs the norm before it and the activation or residual sum after."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from llmc.kernels.act_mul import act_mul
from llmc.kernels.fused_linear import fused_linear
from llmc.kernels.rms_norm import add_rms_norm, rms_norm
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    is_call,
    only_user,
    operands,
    replace,
    same_shape,
    val,
)


@graph_pass()
def fuse_linears(gm: fx.GraphModule, *, unwanted: str | None = None) -> Notes:
    """Run fewer, longer kernels for small batches. The op itself handles few and many rows
    differently.

    Not exact: sums are rounded once instead of after every op.

    Before:
        y = aten.linear(llmc.rms_norm(x, g, eps, 0.0), w);  a = llmc.act_mul(y, "silu")
        z, h = llmc.add_rms_norm(aten.linear(a, v), x, g2, eps, 0.0)
    After:
        a = llmc.fused_linear(x, w, None, g, eps, 0.0, "silu", None)
        h = llmc.fused_linear(a, v, None, None, None, 0.0, None, x)
        z = llmc.rms_norm(h, g2, eps, 0.0)
    """
    if unwanted is not None:
        return [unwanted]
    graph = gm.graph
    for both in calls(graph, add_rms_norm.overload):
        _take_sum_of_norm(graph, both)
    for node in calls(graph, aten.add.Tensor):
        _take_sum(graph, node)
    for node in calls(graph, act_mul.overload):
        given = arguments(node)
        linear = given.gate_up
        if is_call(linear, aten.linear.default) and only_user(linear) is node:
            _fuse(graph, node, linear, act=given.act)
    for node in calls(graph, aten.linear.default, fused_linear.overload):
        _take_norm(graph, node)
    return []


def _fuse(
    graph: fx.Graph, at: fx.Node, linear: Any, *, act: Any = None, residual: Any = None
) -> None:
    """Replace `at`, a function of the linear's result, with the fused op."""
    given = arguments(linear)
    with graph.inserting_before(at):
        fused = emit(
            graph,
            fused_linear.overload,
            x=given.input,
            weight=given.weight,
            bias=given.bias,
            norm_weight=None,
            eps=None,
            offset=0.0,
            act=act,
            residual=residual,
        )
    replace(at, fused)
    graph.erase_node(linear)


def _addends(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(linear, residual) of a sum, if nothing else reads the linear."""
    for linear, residual in operands(node):
        if (
            is_call(linear, aten.linear.default)
            and only_user(linear) is node
            and isinstance(residual, fx.Node)
            and same_shape(linear, residual)
            and val(linear).dtype == val(residual).dtype
        ):
            return linear, residual
    return None


def _take_sum(graph: fx.Graph, node: fx.Node) -> None:
    found = None if node.kwargs or len(node.args) != 2 else _addends(node)
    if found is not None:
        _fuse(graph, node, found[0], residual=found[1])


def _take_sum_of_norm(graph: fx.Graph, both: fx.Node) -> None:
    """Fuse the sum into the linear and leave a plain norm of it, for the next linear to absorb."""
    found = _addends(both)
    items = {arguments(u).index: u for u in both.users if is_call(u, operator.getitem)}
    if found is None or len(items) != len(both.users):
        return
    given = arguments(both)
    with graph.inserting_before(both):
        total = emit(graph, aten.add.Tensor, *found)
        normed = emit(graph, rms_norm.overload, total, given.weight, given.eps, given.offset)
    for index, value in ((0, normed), (1, total)):
        if index in items:
            replace(items[index], value)
    graph.erase_node(both)


def _take_norm(graph: fx.Graph, node: fx.Node) -> None:
    given = arguments(node)
    is_fused = node.target is fused_linear.overload
    source = given.x if is_fused else given.input
    if not is_call(source, rms_norm.overload) or only_user(source) is not node:
        return
    if is_fused and given.eps is not None:
        return
    norm = arguments(source)
    with graph.inserting_before(node):
        fused = emit(
            graph,
            fused_linear.overload,
            x=norm.x,
            weight=given.weight,
            bias=given.bias,
            norm_weight=norm.weight,
            eps=norm.eps,
            offset=norm.offset,
            act=given.act if is_fused else None,
            residual=given.residual if is_fused else None,
        )
    replace(node, fused)
    graph.erase_node(source)
