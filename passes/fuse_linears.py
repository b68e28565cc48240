"""`fuse_linears`: a linear absorbs the norm before it and the activation or residual sum after."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.act_mul import act_mul
from llmc.kernels.fused_linear import add_linear, fused_linear, norm_add_linear
from llmc.kernels.fused_quantized_linear import (
    fused_quantized_linear,
    norm_add_quantized_linear,
)
from llmc.kernels.gated_rms_norm import gated_rms_norm
from llmc.kernels.layer_norm import add_layer_norm, layer_norm
from llmc.kernels.quantized_linear import EXACT_BITS, quantized_linear
from llmc.kernels.rms_norm import add_rms_norm, norm_add, norm_add_norm, rms_norm
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    CASTS,
    arguments,
    aten,
    calls,
    emit,
    is_call,
    items_of,
    keeps_order,
    only_user,
    operands,
    replace,
    reshaped,
    same_shape,
    source_of,
    through,
    val,
)
from llmc.passes.fuse_act_mul import activation
from llmc.passes.inputs import WeightInput, add_input, input_of

_RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
)
_NORM_OF_SUM = {
    add_rms_norm.overload: rms_norm.overload,
    add_layer_norm.overload: layer_norm.overload,
}
_FUSED = {
    aten.linear.default: fused_linear.overload,
    quantized_linear.overload: fused_quantized_linear.overload,
}
_OF_LINEAR = {"weight", "scale", "zero", "bias", "minimum", "act", "gated"}


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
        llmc.add_linear(x, a, v, None, None, None, 0.0, None)
        z = llmc.rms_norm(x, g2, eps, 0.0)
    and where x is an input of the graph, or is also read later, instead of add_linear:
        h = llmc.fused_linear(a, v, None, None, None, 0.0, None, x)

    Before:
        h = aten.add(aten.add(aten.linear(a, v), aten.linear(b, u)), x)
    After:
        llmc.add_linear(x, b, u, None, None, None, 0.0, None)
        llmc.add_linear(x, a, v, None, None, None, 0.0, None)

    Before:
        y = aten.relu(aten.linear(x, w, b))
    After:
        y = llmc.fused_linear(x, w, b, None, None, 0.0, "relu", None, gated=False)

    Before:
        y = aten.linear(llmc.layer_norm(x, g, c, eps), w, b)
    After:
        y = llmc.fused_linear(x, w, b, g, eps, 0.0, None, None, centered=True, norm_bias=c)

    Before:
        y, h = llmc.norm_add_norm(x, r, g, eps, 0.0, g2, eps, 0.0);  z = aten.linear(y, w)
    After:
        z, h = llmc.norm_add_linear(x, r, g, eps, 0.0, w, None, g2, eps, 0.0, None)

    and where the linear reads llmc.norm_add's sum itself, without the norm after it.

    llmc.quantized_linear becomes llmc.fused_quantized_linear or llmc.norm_add_quantized_linear in
    the same way, never in place.

    Before:
        o = aten.linear(llmc.gated_rms_norm(x, z, g, eps, 0.0, "silu", False, group, dtype), w)
    After:
        o = llmc.fused_linear(x, w, None, g, eps, 0.0, None, None, z, "silu", False, group)
    """
    if unwanted is not None:
        return [unwanted]
    graph = gm.graph
    for node in calls(graph, aten.add.Tensor, *_NORM_OF_SUM):
        _add_in_turn(graph, node)
    for both in calls(graph, *_NORM_OF_SUM):
        _take_sum_of_norm(graph, both)
    for node in calls(graph, aten.add.Tensor):
        _take_sum(graph, node)
    for node in calls(graph, act_mul.overload):
        given = arguments(node)
        linear = given.gate_up
        plain = given.limit is None and given.shift == 0 and not given.interleaved
        if plain and _is_linear(linear) and only_user(linear) is node and _halves(linear):
            _fuse(graph, node, linear, act=given.act)
    for node in list(graph.nodes):
        act, linear = activation(node)
        if act is not None and _is_linear(linear) and only_user(linear) is node:
            _fuse(graph, node, linear, act=act, gated=False)
    for node in calls(graph, *_FUSED, *_FUSED.values()):
        _take_norm(graph, node)
    for node in calls(graph, aten.linear.default, fused_linear.overload):
        _take_gated_norm(graph, node)
    for node in calls(graph, norm_add.overload, norm_add_norm.overload):
        _join_reader(graph, node)
    _add_in_place(graph)
    return []


def _fuse(
    graph: fx.Graph,
    at: fx.Node,
    linear: Any,
    *,
    act: Any = None,
    residual: Any = None,
    gated: bool = True,
) -> None:
    """Replace `at`, a function of the linear's result, with the fused op."""
    with graph.inserting_before(at):
        fused = emit(
            graph,
            _FUSED[linear.target],
            **_product(linear),
            norm_weight=None,
            eps=None,
            offset=0.0,
            act=act,
            residual=residual,
            gated=gated,
        )
    replace(at, fused)
    graph.erase_node(linear)


def _is_linear(node: Any) -> bool:
    """Whether it is a linear whose op has a fused form: fp8 inputs are rounded apart."""
    exact = getattr(node, "target", None) is not quantized_linear.overload or (
        arguments(node).x_bits == EXACT_BITS
    )
    return is_call(node, *_FUSED) and exact


def _product(linear: fx.Node) -> dict[str, Any]:
    """x and the tensors of the weight, as the fused op names them."""
    given = vars(arguments(linear))
    names = {"input": "x"}
    return {names.get(name, name): value for name, value in given.items() if name != "x_bits"}


def _as_fused(linear: fx.Node) -> dict[str, Any]:
    """A linear's arguments, as the fused op that it is or could be names them."""
    if is_call(linear, *_FUSED.values()):
        return vars(arguments(linear))
    return {"act": None, "residual": None, **_product(linear)}


def _halves(linear: fx.Node) -> bool:
    """Whether gates, and the channels that they multiply, are whole blocks of a weight."""
    is_quantized = is_call(linear, quantized_linear.overload)
    return not is_quantized or int(val(arguments(linear).weight).shape[0]) % 2 == 0


def _addends(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(linear, residual) of a sum, if nothing else reads the linear."""
    for linear, residual in operands(node):
        if (
            _is_linear(linear)
            and only_user(linear) is node
            and isinstance(residual, fx.Node)
            and same_shape(linear, residual)
            and val(residual).dtype in _sums_of(linear)
        ):
            return linear, residual
    return None


def _sums_of(linear: fx.Node) -> tuple[torch.dtype, ...]:
    """The dtypes of residuals to which a linear's result can be added in one op."""
    own = val(linear).dtype
    return (own,) if is_call(linear, quantized_linear.overload) else (own, torch.float32)


def _add_in_turn(graph: fx.Graph, node: fx.Node) -> None:
    """Turn the sum of two linears and x into two sums, of which each adds one linear: attention and
    feed-forward blocks in parallel."""
    if node.kwargs:
        return
    for both, x in operands(node):
        if not is_call(both, aten.add.Tensor) or both.kwargs or list(both.users) != [node]:
            continue
        found = _addends(both)
        if found is None or not _is_linear(found[1]) or list(found[1].users) != [both]:
            continue
        if not isinstance(x, fx.Node) or not same_shape(x, both) or _is_linear(x):
            continue
        with graph.inserting_before(node):
            total = emit(graph, aten.add.Tensor, found[1], x)
        node.args = (found[0], total, *node.args[2:])
        graph.erase_node(both)
        return


def _take_sum(graph: fx.Graph, node: fx.Node) -> None:
    found = None if node.kwargs or len(node.args) != 2 else _addends(node)
    if found is not None:
        _fuse(graph, node, found[0], residual=found[1])


def _take_sum_of_norm(graph: fx.Graph, both: fx.Node) -> None:
    """Fuse the sum into the linear and leave a plain norm of it, for the next linear to absorb."""
    found = _addends(both)
    items = items_of(both)
    if found is None or len(items) != len(both.users):
        return
    with graph.inserting_before(both):
        total = emit(graph, aten.add.Tensor, *found)
        normed = emit(graph, _NORM_OF_SUM[both.target], total, *both.args[2:])
    for index, value in ((0, normed), (1, total)):
        if index in items:
            replace(items[index], value)
    graph.erase_node(both)


def _take_norm(graph: fx.Graph, node: fx.Node) -> None:
    is_fused = node.target in _FUSED.values()
    if not is_fused and not _is_linear(node):
        return
    given = _as_fused(node)
    source: fx.Node = given["x"]
    # a short norm in each of two linears takes less time than a kernel before them
    if len(source.users) > 2 or not all(_may_take(user, source) for user in source.users):
        return
    around = _norm(source, wide=is_call(node, aten.linear.default, fused_linear.overload))
    if around is None:
        return
    with graph.inserting_before(node):
        fused = emit(
            graph,
            node.target if is_fused else _FUSED[node.target],
            **{**given, **around},
        )
    replace(node, fused)
    if not source.users:
        graph.erase_node(source)


def _may_take(node: fx.Node, norm: fx.Node) -> bool:
    """Whether a linear, without a norm yet, reads a norm as its x alone."""
    if not is_call(node, *_FUSED.values()):
        return _is_linear(node) and _product(node)["x"] is norm
    given = arguments(node)
    return given.eps is None and given.x is norm and given.residual is not norm


def _norm(source: Any, *, wide: bool) -> dict[str, Any] | None:
    """A norm's input and parameters, as the fused op that absorbs it names them. `wide`: the op
    may read float32, where the model rounds it first."""
    if not is_call(source, rms_norm.overload, layer_norm.overload):
        return None
    given = arguments(source)
    x = given.x
    if wide and is_call(x, *CASTS) and val(x.args[0]).dtype == torch.float32:
        x = x.args[0]
    if is_call(source, rms_norm.overload):
        return {
            "x": x,
            "norm_weight": given.weight,
            "eps": given.eps,
            "offset": given.offset,
        }
    return {
        "x": x,
        "norm_weight": given.weight,
        "eps": given.eps,
        "offset": 0.0,
        "centered": True,
        "norm_bias": given.bias,
    }


def _take_gated_norm(graph: fx.Graph, node: fx.Node) -> None:
    given = arguments(node)
    is_fused = node.target is fused_linear.overload
    if is_fused and given.eps is not None:
        return
    source = given.x if is_fused else given.input
    shape = val(source).shape
    reader = node
    while keeps_order(source) and only_user(source) is reader:
        source, reader = source.args[0], source
    if not is_call(source, gated_rms_norm.overload) or only_user(source) is not reader:
        return
    norm = arguments(source)
    if shape[-1] % val(source).shape[-1]:
        return
    weight = _repeated(graph, norm.weight, shape[-1])
    if weight is None and norm.weight is not None:
        return
    with graph.inserting_before(node):
        fused = emit(
            graph,
            fused_linear.overload,
            x=reshaped(graph, source_of(norm.x), shape),
            weight=given.weight,
            bias=given.bias,
            norm_weight=weight,
            eps=norm.eps,
            offset=norm.offset,
            act=given.act if is_fused else None,
            gated=is_fused and given.gated,
            residual=given.residual if is_fused else None,
            gate=reshaped(graph, source_of(norm.gate), shape),
            gate_act=norm.act,
            gate_first=norm.gate_first,
            group=norm.group,
        )
    replace(node, fused)


def _join_reader(graph: fx.Graph, node: fx.Node) -> None:
    """Fuse a sum with a norm in it, and perhaps one of it, into the only linear that reads it."""
    given = arguments(node)
    is_normed_again = is_call(node, norm_add_norm.overload)
    results, of_sum = {0: node, 1: node}, (None, None, 0.0)
    if is_normed_again:
        results = items_of(node)
        of_sum = given.next_weight, given.next_eps, given.next_offset
    normed = results.get(0)
    if normed is None:
        return
    readers = [user for user in normed.users if _may_take(user, normed)]
    if len(readers) != 1 or (is_normed_again and len(normed.users) != 1):
        return
    (linear,) = readers
    around = _as_fused(linear)
    if around["residual"] is not None or val(linear).dtype != val(given.x).dtype:
        return
    own = {name: value for name, value in around.items() if name in _OF_LINEAR}
    if any(isinstance(v, fx.Node) and v.op != "placeholder" for v in own.values()):
        return  # it may be computed later
    norm_weight, eps, offset = of_sum
    op = norm_add_quantized_linear if "scale" in own else norm_add_linear
    with graph.inserting_before(node):
        both = emit(
            graph, op.overload, x=given.x, residual=given.residual, x_weight=given.weight,
            x_eps=given.eps, x_offset=given.offset, norm_weight=norm_weight, eps=eps,
            offset=offset, **own,
        )  # fmt: skip
        y, added = (emit(graph, operator.getitem, both, i) for i in (0, 1))
    replace(linear, y)
    if 1 in results:
        replace(results[1], added)


def _repeated(graph: fx.Graph, weight: fx.Node | None, width: int) -> fx.Node | None:
    """A norm's weight as often as it fits into `width` channels; None if it is computed."""
    if weight is None or val(weight).shape[0] == width:
        return weight
    role = input_of(weight)
    if not isinstance(role, WeightInput):
        return None
    size = val(weight).shape[0]
    order = (role.order or ((0, size),)) * (width // size)
    fake = val(weight).new_empty(width)
    return add_input(graph, f"{weight.name}_repeated", dataclasses.replace(role, order=order), fake)


def _add_in_place(graph: fx.Graph) -> None:
    """Add to a residual itself where nothing reads it afterwards: with many rows, adding a product
    to a matrix of its own begins with a copy of the residual."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in calls(graph, fused_linear.overload):
        given = vars(arguments(node))
        residual = given.pop("residual")
        if residual is None or not _is_last_reader(node, residual, order):
            continue
        with graph.inserting_before(node):
            added = emit(graph, add_linear.overload, out=residual, **given)
        order[added] = order[node]
        replace(node, residual)


def _is_last_reader(node: fx.Node, value: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether the graph itself made the memory of `value`, each of its elements has a place of its
    own there, `node` reads it by this argument alone, and nothing reads it later."""
    if _may_be_view(through(value, *_RESHAPES, operator.getitem)):
        return False
    shared = _sharing_memory(value)
    if not shared or sum(operand in shared for operand in node.args) > 1:
        return False
    return all(order[user] <= order[node] for one in shared for user in one.users)


def _sharing_memory(value: fx.Node) -> set[fx.Node]:
    """All values that may share memory with `value`; none if an input of the graph may."""
    found: set[fx.Node] = set()
    left = [value]
    while left:
        node = left.pop()
        if node in found:
            continue
        if node.op != "call_function":
            return set()
        found.add(node)
        if _may_be_view(node):
            left += [source for source in node.all_input_nodes if _holds_tensors(source)]
        left += [user for user in node.users if _may_be_view(user)]
    return found


def _may_be_view(node: fx.Node) -> bool:
    """Whether a call's result may share memory with its arguments. Composite ops of torch do not
    say so in their schema."""
    if node.op != "call_function" or not _holds_tensors(node) or node.target is aten.linear.default:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        node.target.name(), "CompositeImplicitAutograd"
    )
    return is_composite or any(r.alias_info is not None for r in node.target._schema.returns)


def _holds_tensors(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor | tuple | list)
