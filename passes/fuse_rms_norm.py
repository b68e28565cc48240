"""`fuse_rms_norm`: fuse the six or so ops of an RMSNorm and the residual sum beside it into one."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.kernels.rms_norm import add_rms_norm, norm_add, norm_add_norm, rms_norm
from llmc.passes.base import Notes, graph_pass, remove_dead_code
from llmc.passes.edit import (
    CASTS,
    arguments,
    aten,
    calls,
    emit,
    is_call,
    only_user,
    operands,
    replace,
    same_shape,
    through,
    val,
)
from llmc.passes.inputs import WeightInput, input_of


@dataclass(frozen=True, slots=True)
class _Norm:
    x: fx.Node  # the value that is normalized, before any cast
    weight: fx.Node | None
    eps: float
    offset: float
    last: fx.Node  # the node that the fused op replaces


@graph_pass()
def fuse_rms_norm(gm: fx.GraphModule) -> Notes:
    """Fuse RMSNorm, and the residual addition before or after it.

    Before:
        h = aten.add(x, residual)
        r = aten.rsqrt(aten.add(aten.mean(aten.pow(h, 2), [-1], True), eps))
        y = aten.mul(weight, aten.mul(h, r))
    After:
        y, h = llmc.add_rms_norm(x, residual, weight, eps, 0.0)

    A model may write rsqrt as a power of -0.5, which aten computes as rsqrt too.

    Before:
        h = aten.add(residual, llmc.rms_norm(x, weight, eps, 0.0))
        y, h2 = llmc.add_rms_norm(llmc.rms_norm(x2, weight2, eps, 0.0), h, weight3, eps, 0.0)
    After:
        h = llmc.norm_add(x, residual, weight, eps, 0.0)
        y, h2 = llmc.norm_add_norm(x2, h, weight2, eps, 0.0, weight3, eps, 0.0)
    """
    graph = gm.graph
    notes = []
    for rsqrt in calls(graph, aten.rsqrt.default, aten.pow.Tensor_Scalar):
        if is_call(rsqrt, aten.pow.Tensor_Scalar) and arguments(rsqrt).exponent != -0.5:
            continue
        norm = _match(rsqrt)
        if norm is None:
            notes.append(f"{rsqrt.name}: not an RMSNorm over the last dimension")
            continue
        _fuse(graph, norm)
    for node in calls(graph, aten.rms_norm.default):
        _spell(graph, node)
    remove_dead_code(graph)  # sums that were fused still read the norms before them
    for node in calls(graph, aten.add.Tensor, add_rms_norm.overload):
        _take_norm(graph, node)
    return notes


def normalized(rsqrt: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """(x32, y, eps) if rsqrt is part of y = x32 * rsqrt(mean(x32^2) + eps), over the last
    dimension."""
    if is_call(rsqrt, aten.pow.Tensor_Scalar) and arguments(rsqrt).exponent != -0.5:
        return None
    total = arguments(rsqrt).self
    if not _is_sum(total):
        return None
    mean, eps = arguments(total).self, arguments(total).other
    if not isinstance(eps, float) or not is_call(mean, aten.mean.dim):
        return None
    given = arguments(mean)
    if list(given.dim or ()) != [-1] or not given.keepdim:
        return None
    if not is_call(given.self, aten.pow.Tensor_Scalar) or arguments(given.self).exponent != 2:
        return None
    x32 = arguments(given.self).self
    scaled = only_user(rsqrt)
    if scaled is None or not is_call(scaled, aten.mul.Tensor):
        return None
    if set(scaled.all_input_nodes) != {x32, rsqrt}:
        return None
    return x32, scaled, eps


def _match(rsqrt: fx.Node) -> _Norm | None:
    found = normalized(rsqrt)
    if found is None:
        return None
    x32, scaled, eps = found
    is_cast = is_call(x32, *CASTS) and val(x32).dtype.itemsize == 4
    x = arguments(x32).self if is_cast else x32
    last, weight, offset = _follow(scaled)
    if val(last).dtype != val(x).dtype or not same_shape(last, x):
        return None
    return _Norm(x, weight, eps, offset, last)


def _follow(scaled: fx.Node) -> tuple[fx.Node, fx.Node | None, float]:
    """Follow the users of the normalized value: past a cast, the weight, and another cast."""
    node = scaled
    weight, offset = None, 0.0
    node = _past_cast(node)
    user = only_user(node)
    if is_call(user, aten.mul.Tensor):
        for mine, other in operands(user):  # type: ignore[arg-type]
            found = weight_of(other)
            if mine is node and found is not None and _is_per_channel(found[0], node):
                weight, offset = found
                node = _past_cast(user)  # type: ignore[arg-type]
                break
    return node, weight, offset


def _past_cast(node: fx.Node) -> fx.Node:
    user = only_user(node)
    return user if is_call(user, *CASTS) else node  # type: ignore[return-value]


def weight_of(node: Any) -> tuple[fx.Node, float] | None:
    """(parameter, offset) for a 1-D parameter, possibly cast, possibly plus a constant."""
    offset = 0.0
    node = through(node, *CASTS)
    if _is_sum(node):
        for a, b in operands(node):
            if isinstance(b, int | float) and isinstance(a, fx.Node):
                node, offset = a, float(b)
                break
        node = through(node, *CASTS)
    if isinstance(input_of(node), WeightInput) and val(node).dim() == 1:
        return node, offset
    return None


def _is_sum(node: Any) -> bool:
    """Whether it adds its arguments as they are, without a factor (alpha)."""
    return is_call(node, aten.add.Tensor, aten.add.Scalar) and not node.kwargs


def _is_per_channel(weight: fx.Node, x: fx.Node) -> bool:
    """Whether it has a value for each channel of `x`: a single one for all would be broadcast."""
    return bool(val(weight).shape[0] == val(x).shape[-1])


def _fuse(graph: fx.Graph, norm: _Norm) -> None:
    x = norm.x
    if is_call(x, aten.add.Tensor) and not x.kwargs:
        a, b = arguments(x).self, arguments(x).other
        if _is_like(a, x) and _is_like(b, x):
            with graph.inserting_before(x):
                both = emit(graph, add_rms_norm.overload, a, b, norm.weight, norm.eps, norm.offset)
                y, total = (_item(graph, both, i) for i in (0, 1))
            norm.last.replace_all_uses_with(y)
            x.replace_all_uses_with(total)
            return
    with graph.inserting_before(norm.last):
        fused = emit(graph, rms_norm.overload, x, norm.weight, norm.eps, norm.offset)
    replace(norm.last, fused)


def _take_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Fuse a norm into the sum that alone reads it."""
    both = is_call(node, add_rms_norm.overload)
    if node.kwargs or (not both and len(node.args) != 2):
        return
    for normed, residual in operands(node):
        if not is_call(normed, rms_norm.overload) or only_user(normed) is not node:
            continue
        given = arguments(normed)
        if not _is_like(residual, normed):
            continue
        with graph.inserting_before(node):
            args = [given.x, residual, given.weight, given.eps, given.offset]
            if both:
                after = arguments(node)
                args += [after.weight, after.eps, after.offset]
            fused = emit(graph, (norm_add_norm if both else norm_add).overload, *args)
        replace(node, fused)
        return


def _is_like(node: Any, total: fx.Node) -> bool:
    """Whether an addend is a tensor of the sum's shape and dtype."""
    return (
        isinstance(node, fx.Node)
        and same_shape(node, total)
        and val(node).dtype == val(total).dtype
    )


def _item(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


def _spell(graph: fx.Graph, node: fx.Node) -> None:
    """Replace aten.rms_norm over the last dimension, which is the same op."""
    given = arguments(node)
    if len(given.normalized_shape) != 1 or given.eps is None:
        return
    with graph.inserting_before(node):
        fused = emit(graph, rms_norm.overload, given.input, given.weight, given.eps, 0.0)
    replace(node, fused)
