"""`fuse_norms`: fuse the six or so ops of a norm and the residual sum beside it into one."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.kernels.layer_norm import add_layer_norm, layer_norm
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
    is_centered: bool = False  # a LayerNorm, otherwise an RMSNorm
    bias: fx.Node | None = None

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The last arguments of the norm's op."""
        if self.is_centered:
            return self.weight, self.bias, self.eps
        return self.weight, self.eps, self.offset


@graph_pass()
def fuse_norms(gm: fx.GraphModule) -> Notes:
    """Fuse RMSNorm or LayerNorm, and the residual addition before or after it.

    Before:
        h = aten.add(x, residual)
        r = aten.rsqrt(aten.add(aten.mean(aten.pow(h, 2), [-1], True), eps))
        y = aten.mul(weight, aten.mul(h, r))
    After:
        y, h = llmc.add_rms_norm(x, residual, weight, eps, 0.0)

    A model may write rsqrt as a power of -0.5, which aten computes as rsqrt too, or divide by sqrt.

    Before:
        c = aten.sub(x, aten.mean(x, [-1], True))
        r = aten.rsqrt(aten.add(aten.mean(aten.pow(c, 2), [-1], True), eps))
        y = aten.add(aten.mul(aten.mul(c, r), weight), bias)
        z = aten.layer_norm(x, [N], weight, bias, eps)
    After:
        y = llmc.layer_norm(x, weight, bias, eps);  z = llmc.layer_norm(x, weight, bias, eps)

    and llmc.add_layer_norm with the sum before it.

    Before:
        h = aten.add(residual, llmc.rms_norm(x, weight, eps, 0.0))
        y, h2 = llmc.add_rms_norm(llmc.rms_norm(x2, weight2, eps, 0.0), h, weight3, eps, 0.0)
    After:
        h = llmc.norm_add(x, residual, weight, eps, 0.0)
        y, h2 = llmc.norm_add_norm(x2, h, weight2, eps, 0.0, weight3, eps, 0.0)
    """
    graph = gm.graph
    notes = []
    for node in calls(graph, *_ROOTS, *_LIBRARY):
        norm = _library_norm(node) if node.target in _LIBRARY else _match(node)
        if norm is not None:
            _fuse(graph, norm)
        elif is_call(node, aten.rsqrt.default):
            notes.append(f"{node.name}: not a norm over the last dimension")
    remove_dead_code(graph)  # sums that were fused still read the norms before them
    for node in calls(graph, aten.add.Tensor, add_rms_norm.overload):
        _take_norm(graph, node)
    return notes


_ROOTS = (aten.rsqrt.default, aten.pow.Tensor_Scalar, aten.sqrt.default)
_LIBRARY = (aten.rms_norm.default, aten.layer_norm.default)


def normalized(root: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """(x32, y, eps) if `root` is part of y = x32 / sqrt(mean(x32^2) + eps), over the last
    dimension."""
    if is_call(root, aten.pow.Tensor_Scalar) and arguments(root).exponent != -0.5:
        return None
    total = arguments(root).self
    if not _is_sum(total):
        return None
    mean, eps = arguments(total).self, arguments(total).other
    x32 = _squared(_mean_of(mean))
    scaled = only_user(root)
    if not isinstance(eps, float) or x32 is None or scaled is None:
        return None
    if is_call(root, aten.sqrt.default):
        is_norm = is_call(scaled, aten.div.Tensor) and scaled.args[1] is root
        return (x32, scaled, eps) if is_norm and _are_same(scaled.args[0], x32) else None
    if not is_call(scaled, aten.mul.Tensor):
        return None
    is_norm = any(one is root and _are_same(other, x32) for one, other in operands(scaled))
    return (x32, scaled, eps) if is_norm else None


def _mean_of(node: Any) -> Any:
    """x if `node` is its mean over the last dimension, which is kept."""
    if not is_call(node, aten.mean.dim):
        return None
    given = arguments(node)
    return given.self if list(given.dim or ()) == [-1] and given.keepdim else None


def _squared(node: Any) -> fx.Node | None:
    """x if `node` is x^2."""
    if is_call(node, aten.pow.Tensor_Scalar) and arguments(node).exponent == 2:
        return node.args[0]  # type: ignore[no-any-return]
    is_product = is_call(node, aten.mul.Tensor, aten.square.default)
    return node.args[0] if is_product and len(set(node.args)) == 1 else None


def _are_same(a: Any, b: fx.Node) -> bool:
    """Whether they are one value; a model may have computed the difference to a mean twice."""
    return a is b or _centered(a) is not None and _centered(a) is _centered(b)


def _centered(node: Any) -> fx.Node | None:
    """x if `node` is x - mean(x) over the last dimension."""
    if not is_call(node, aten.sub.Tensor) or node.kwargs:
        return None
    x, mean = node.args
    return x if isinstance(x, fx.Node) and _mean_of(mean) is x else None


def _match(root: fx.Node) -> _Norm | None:
    found = normalized(root)
    if found is None:
        return None
    x32, scaled, eps = found
    original = _centered(x32)
    is_centered, x32 = original is not None, original or x32
    is_cast = is_call(x32, *CASTS) and val(x32).dtype.itemsize == 4
    x = arguments(x32).self if is_cast else x32
    last, weight, offset = _follow(scaled, may_add=not is_centered)
    bias = None
    if is_centered:
        last, bias = _follow_bias(last)
    if val(last).dtype != val(x).dtype or not same_shape(last, x):
        return None
    return _Norm(x, weight, eps, offset, last, is_centered, bias)


def _library_norm(node: fx.Node) -> _Norm | None:
    """torch's own norm over the last dimension, perhaps between casts to float32 and back."""
    given = arguments(node)
    if len(given.normalized_shape) != 1 or given.eps is None:
        return None
    x, last, parameters = given.input, node, (given.weight, getattr(given, "bias", None))
    user: Any = only_user(node)
    if is_call(x, *CASTS) and is_call(user, *CASTS):
        narrow: Any = x.args[0]
        if val(x).dtype.itemsize == 4 and val(user).dtype == val(narrow).dtype:
            x, last = narrow, user
            parameters = tuple(through(p, *CASTS) for p in parameters)
    if any(p is not None and val(p).dtype != val(x).dtype for p in parameters):
        return None
    weight, bias = parameters
    return _Norm(x, weight, given.eps, 0.0, last, is_call(node, aten.layer_norm.default), bias)


def _follow(scaled: fx.Node, *, may_add: bool) -> tuple[fx.Node, fx.Node | None, float]:
    """Follow the users of the normalized value: past a cast, the weight, to which a constant may be
    added, and another cast."""
    node = scaled
    weight, offset = None, 0.0
    node = _past_cast(node)
    user = only_user(node)
    if is_call(user, aten.mul.Tensor):
        for mine, other in operands(user):  # type: ignore[arg-type]
            found = weight_of(other)
            if mine is node and found is not None and _is_per_channel(found[0], node):
                if found[1] and not may_add:
                    break
                weight, offset = found
                node = _past_cast(user)  # type: ignore[arg-type]
                break
    return node, weight, offset


def _follow_bias(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    user = only_user(node)
    if _is_sum(user):
        for mine, other in operands(user):  # type: ignore[arg-type]
            found = weight_of(other)
            if mine is node and found and not found[1] and _is_per_channel(found[0], node):
                return _past_cast(user), found[0]  # type: ignore[arg-type]
    return node, None


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
    op, op_of_sum = (layer_norm, add_layer_norm) if norm.is_centered else (rms_norm, add_rms_norm)
    are_inputs = all(p is None or p.op == "placeholder" for p in (norm.weight, norm.bias))
    if is_call(x, aten.add.Tensor) and not x.kwargs and are_inputs:
        a, b = arguments(x).self, arguments(x).other
        if _is_like(a, x) and _is_like(b, x):
            with graph.inserting_before(x):
                both = emit(graph, op_of_sum.overload, a, b, *norm.parameters)
                y, total = (emit(graph, operator.getitem, both, i) for i in (0, 1))
            norm.last.replace_all_uses_with(y)
            x.replace_all_uses_with(total)
            return
    with graph.inserting_before(norm.last):
        fused = emit(graph, op.overload, x, *norm.parameters)
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
