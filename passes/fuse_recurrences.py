"""`fuse_recurrences`: recurrent ops take over the activations and gates around them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.selective_scan import selective_scan
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
    set_arguments,
    source_of,
    through,
    through_reshapes,
    update_val,
    val,
)

_TURNS = (aten.numpy_T.default, aten.t.default, aten.transpose.int, aten.permute.default)


@graph_pass()
def fuse_recurrences(gm: fx.GraphModule) -> Notes:
    """Make the elementwise ops around recurrent ops arguments of those.

    Not exact: these values are no longer rounded on their own.

    Before:
        y = aten.silu(llmc.causal_conv(x, w, b, None, ...))
        y = aten.mul(g, llmc.causal_conv(aten.mul(f, x), w, b, None, ...))
        g = aten.mul(rate [H], aten.softplus(aten.add(a [1, T, H], bias [H])))
        q, k = (aten.repeat_interleave(x [1, T, G, D], H / G, 2) for x in (q, k))
        o = llmc.delta_rule(q, k, v, g, aten.sigmoid(c), scale, eps, None, None, None, ...)
        z = aten.mul(llmc.selective_scan(..., gate=None, ...), aten.silu(u))
    After:
        y = llmc.causal_conv(x, w, b, "silu", ...)
        y = llmc.causal_conv(x, w, b, None, ..., x_gate=f, y_gate=g)
        o = llmc.delta_rule(q, k, v, a, c, scale, eps, rate, bias, 1.0, ...)
        z = llmc.selective_scan(..., gate=u, ...)
    """
    graph = gm.graph
    for node in calls(graph, causal_conv.overload):
        _take_activation(node)
        _take_x_gate(graph, node)
        _take_y_gate(graph, node)
    for node in calls(graph, delta_rule.overload):
        _read_groups(graph, node)
        _take_decay(graph, node)
        _take_beta(graph, node)
    for node in calls(graph, selective_scan.overload):
        _read_as_stored(graph, node)
        _take_gate(graph, node)
        _take_cast(node)
    return []


def _take_activation(conv: fx.Node) -> None:
    at, user = _moved(conv)
    if is_call(user, aten.silu.default) and arguments(conv).act is None:
        set_arguments(conv, act="silu")
        replace(user, at)  # type: ignore[arg-type]


def _moved(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The last of the calls that only move a value's elements, and the only call that reads it."""
    user = only_user(node)
    while user is not None and (keeps_order(user) or is_call(user, *_TURNS)):
        node, user = user, only_user(user)
    return node, user


def _take_x_gate(graph: fx.Graph, conv: fx.Node) -> None:
    product = through_reshapes(arguments(conv).x, *_TURNS)
    if not is_call(product, aten.mul.Tensor) or _moved(product)[1] is not conv:
        return
    if all(_has_its_elements(factor, conv) for factor in product.args):
        with graph.inserting_before(conv):
            rows = [_by_token(graph, factor) for factor in product.args]
        set_arguments(conv, x=rows[0], x_gate=rows[1])


def _take_y_gate(graph: fx.Graph, conv: fx.Node) -> None:
    at, product = _moved(conv)
    if not is_call(product, aten.mul.Tensor) or not _has_its_elements(product, conv):
        return
    for one, gate in operands(product):  # type: ignore[arg-type]
        if one is at and _has_its_elements(gate, conv) and gate < conv:
            with graph.inserting_before(conv):
                set_arguments(conv, y_gate=_by_token(graph, gate))
            return replace(product, at)  # type: ignore[arg-type]


def _has_its_elements(node: Any, conv: fx.Node) -> bool:
    """Whether a value has as many elements as the convolution's result [T, C], in its dtype."""
    if not isinstance(node, fx.Node) or val(node).dtype != val(conv).dtype:
        return False
    return sorted(_sizes(node), key=str) == sorted(_sizes(conv), key=str)


def _sizes(node: fx.Node) -> list[Any]:
    return [size for size in val(node).shape if not isinstance(size, int) or size != 1]


def _by_token(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """[T, C] or [C, T], with other sizes of 1, as [T, C]."""
    sizes = _sizes(node)
    rows = reshaped(graph, node, sizes)
    return emit(graph, aten.transpose.int, rows, 0, 1) if isinstance(sizes[0], int) else rows


def _read_groups(graph: fx.Graph, node: fx.Node) -> None:
    """Read query and key without copies for the heads that share a group of them."""
    given = arguments(node)
    groups = {name: _before_repeat(getattr(given, name)) for name in ("query", "key")}
    if None in groups.values() or len({val(g).shape[-2] for g in groups.values()}) > 1:
        return
    with graph.inserting_before(node):
        for name, group in groups.items():
            num_tokens, _, dim = val(getattr(given, name)).shape
            shape = (num_tokens, val(group).shape[-2], dim)
            set_arguments(node, **{name: reshaped(graph, group, shape)})


def _before_repeat(heads: fx.Node) -> Any:
    """x of repeat_interleave(x [..., G, D], n, -2), which is `heads` in another shape, or None."""
    repeated = through_reshapes(heads)
    if not is_call(repeated, aten.repeat_interleave.self_int):
        return None
    given, shape = arguments(repeated), val(repeated).shape
    is_by_head = given.dim in (-2, len(shape) - 2) and shape[-2:] == val(heads).shape[-2:]
    return given.self if is_by_head else None


def _take_decay(graph: fx.Graph, node: fx.Node) -> None:
    given = arguments(node)
    _, heads, decays = val(given.decay).shape
    product = through_reshapes(given.decay)
    if given.decay_rate is not None or not is_call(product, aten.mul.Tensor):
        return
    for rate, activated in operands(product):
        total = _softplus_of(through_reshapes(activated))
        if not is_call(total, aten.add.Tensor) or total.kwargs:
            continue
        for a, bias in operands(total):
            if not isinstance(a, fx.Node) or not same_shape(a, total):
                continue  # the same number for several channels
            if not _per_channel(bias, total, heads, decays, decays):
                continue
            if _per_channel(rate, product, heads, decays, 1):
                with graph.inserting_before(node):
                    set_arguments(
                        node,
                        decay=reshaped(graph, source_of(a), val(given.decay).shape),
                        decay_rate=reshaped(graph, source_of(rate), (heads,)),
                        decay_bias=reshaped(graph, source_of(bias), (heads, decays)),
                    )
                return


def _softplus_of(node: Any) -> Any:
    """x of softplus(x), which a model may also write as where(x > 20, x, log(1 + exp(x)))."""
    if is_call(node, aten.softplus.default):
        given = arguments(node)
        return through_reshapes(given.self) if (given.beta, given.threshold) == (1, 20) else None
    if not is_call(node, aten.where.self):
        return None
    given = arguments(node)
    x, large, log = given.self, given.condition, given.other
    if not is_call(large, aten.gt.Scalar) or arguments(large).self is not x:
        return None
    if arguments(large).other != 20 or not is_call(log, aten.log.default):
        return None
    total = arguments(log).self
    if not is_call(total, aten.add.Tensor, aten.add.Scalar) or total.kwargs:
        return None
    exp: Any = next((e for e, one in operands(total) if one == 1), None)
    is_exp = is_call(exp, aten.exp.default) and arguments(exp).self is x
    return through_reshapes(x) if is_exp else None


def _per_channel(numbers: Any, at: fx.Node, heads: int, decays: int, each: int) -> bool:
    """Whether an operand of `at` [1, T, heads * decays, in any shape] has `each` numbers per head
    (1: for all its channels), the same for all tokens."""
    if not isinstance(numbers, fx.Node):
        return False
    sizes = [s if isinstance(s, int) else 1 for s in val(at).shape]
    shape = val(numbers).shape
    if not all(isinstance(s, int) for s in shape) or math.prod(sizes) != heads * decays:
        return False
    if math.prod(shape) != heads * each:
        return False
    index = torch.arange(heads * each).view(shape).broadcast_to(sizes).reshape(heads, decays)
    return bool((index == torch.arange(heads * each).view(heads, each)).all())


def _take_beta(graph: fx.Graph, node: fx.Node) -> None:
    given = arguments(node)
    scale, beta = 1.0, through_reshapes(given.beta, *CASTS)
    if is_call(beta, aten.mul.Tensor) and isinstance(arguments(beta).other, int | float):
        scale, beta = float(arguments(beta).other), through_reshapes(arguments(beta).self, *CASTS)
    if given.beta_scale is None and is_call(beta, aten.sigmoid.default) and scale != 0:
        with graph.inserting_before(node):
            inside = reshaped(graph, source_of(arguments(beta).self), val(given.beta).shape)
            set_arguments(node, beta=inside, beta_scale=scale)


def _read_as_stored(graph: fx.Graph, node: fx.Node) -> None:
    """Read the weights of a scan without a cast, which the op does itself."""
    given = arguments(node)
    for name, weight in (("skip", given.skip), ("dt_bias", given.dt_bias)):
        if weight is not None:
            with graph.inserting_before(node):
                stored = reshaped(graph, source_of(weight), val(weight).shape)
            set_arguments(node, **{name: stored})


def _take_gate(graph: fx.Graph, node: fx.Node) -> None:
    """Multiply by silu(gate) in the scan, if nothing else reads its result."""
    user = _reader(node)
    if arguments(node).gate is not None or not is_call(user, aten.mul.Tensor):
        return
    for mine, other in operands(user):
        is_gate = is_call(through(other, *CASTS), aten.silu.default)
        if not is_gate or through_reshapes(mine) is not node or not same_shape(mine, other):
            continue
        gate = source_of(arguments(through(other, *CASTS)).self)
        order = {n: i for i, n in enumerate(graph.nodes)}
        if order[gate] < order[node]:
            with graph.inserting_before(node):
                set_arguments(node, gate=reshaped(graph, gate, val(node).shape))
            replace(user, mine)
        return


def _take_cast(node: fx.Node) -> None:
    cast = _reader(node)
    if is_call(cast, *CASTS) and val(node).dtype == torch.float32:
        set_arguments(node, dtype=val(cast).dtype)
        at: Any = node
        while at is not cast:
            update_val(at)
            at = only_user(at)
        replace(cast, arguments(cast).self)


def _reader(node: fx.Node) -> Any:
    """The only reader of a value, past reshapes; None if there are several."""
    user = only_user(node)
    while user is not None and keeps_order(user):
        user = only_user(user)
    return user
