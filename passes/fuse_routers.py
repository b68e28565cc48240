"""`fuse_routers`: choose a token's experts in one op, and add their results in another."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from llmc.kernels.choose_experts import choose_experts, sum_experts
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.rms_norm import add_rms_norm, rms_norm
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    CASTS,
    arguments,
    aten,
    calls,
    emit,
    is_call,
    only_user,
    operands,
    positional,
    replace,
    same_shape,
    val,
)
from llmc.passes.find_attention import SOFTMAX
from llmc.passes.inputs import StepInput, input_of

_RESHAPES = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)


@graph_pass()
def fuse_routers(gm: fx.GraphModule) -> Notes:
    """Run a router's softmax and top-k in one kernel, and the weighted sum of the experts in one.
    Padding tokens choose no expert, so no weight is read for them alone.

    Not exact: both are computed in float32 and rounded once.

    Before:
        v, i = aten.topk(aten.softmax(logits, -1), 8);  w = aten.div(v, aten.sum(v, [-1], True))
        y = llmc.expert_linear(.., aten.reshape(i, [-1]), ..)
        z = aten.sum(aten.mul(aten.reshape(y, [-1, 8, N]), aten.unsqueeze(w, -1)), [1])
    After:
        w, i = llmc.choose_experts(logits, slot_mapping, 8, True, dtype)
        y = llmc.expert_linear(.., aten.reshape(i, [-1]), ..)
        z = llmc.sum_experts(y, w, dtype)
    and a residual sum after it becomes part of `sum_experts`; a softmax of the top-k's values is
    replaced in the same way.
    """
    left = 0
    for node in calls(gm.graph, aten.topk.default):
        if _is_router(node):
            left += not _choose(gm.graph, node)
    for node in calls(gm.graph, aten.sum.dim_IntList):
        _sum(gm.graph, node)
    return [f"{left} routers are not a softmax and its highest values"] if left else []


def _is_router(topk: fx.Node) -> bool:
    """Whether the numbers of the highest values do nothing but choose experts."""
    index = _items(topk).get(1)
    return index is not None and _only_chooses(index)


def _only_chooses(index: fx.Node) -> bool:
    return bool(index.users) and all(
        (is_call(user, *_RESHAPES) and _only_chooses(user))
        or (
            is_call(user, expert_linear.overload, quantized_expert_linear.overload)
            and arguments(user).expert is index
        )
        for user in index.users
    )


def _items(node: fx.Node) -> dict[int, fx.Node]:
    return {arguments(u).index: u for u in node.users if is_call(u, operator.getitem)}


def _choose(graph: fx.Graph, topk: fx.Node) -> bool:
    given, items = arguments(topk), _items(topk)
    values = items.get(0)
    if values is None or not given.largest or not _is_last(topk, given.dim):
        return False
    source, after = given.self, only_user(values)
    if is_call(source, *SOFTMAX) and _is_last(source, arguments(source).dim):
        if only_user(source) is not topk:
            return False
        logits, divided = arguments(source).self, _quotient(values)
    elif after is not None and is_call(after, *SOFTMAX) and _is_last(after, arguments(after).dim):
        logits, divided = source, after
    else:
        return False
    if val(logits).dim() != 2:
        return False
    weight = divided or values
    cast = _cast(weight)
    weight = cast or weight
    with graph.inserting_before(topk):
        chosen = emit(
            graph,
            choose_experts.overload,
            logits=logits,
            slot_mapping=_slots(graph, logits),
            count=given.k,
            normalized=divided is not None,
            dtype=val(weight).dtype,
        )
        new_weight, new_index = (emit(graph, operator.getitem, chosen, i) for i in (0, 1))
    weight.replace_all_uses_with(new_weight)
    items[1].replace_all_uses_with(new_index)
    for old in (cast, divided):  # dead, but the quotient is often written in place
        if old is not None and not old.users:
            graph.erase_node(old)
    return True


def _cast(node: fx.Node) -> fx.Node | None:
    """The conversion of a value to another type of float, if nothing else reads the value."""
    user = only_user(node)
    if user is None or not is_call(user, *CASTS):
        return None
    return user if val(user).dtype.is_floating_point else None


def _quotient(values: fx.Node) -> fx.Node | None:
    """values / values.sum(-1, keepdim=True), if nothing else reads the values."""
    users = list(values.users)
    for total, quotient in (users, users[::-1]) if len(users) == 2 else ():
        if not is_call(total, aten.sum.dim_IntList) or only_user(total) is not quotient:
            continue
        given = arguments(total)
        is_sum = given.keepdim and [d % val(values).dim() for d in given.dim] == [1]
        is_quotient = is_call(quotient, aten.div.Tensor, aten.div_.Tensor)
        if is_sum and is_quotient and tuple(quotient.args) == (values, total):
            return quotient
    return None


def _is_last(node: fx.Node, dim: int) -> bool:
    source = arguments(node).self
    return dim % val(source).dim() == val(source).dim() - 1


def _slots(graph: fx.Graph, logits: fx.Node) -> fx.Node | None:
    """The step's cache slots, if the logits are those of its tokens."""
    for node in graph.nodes:
        if node.op == "placeholder" and input_of(node) == StepInput(name="slot_mapping"):
            same = str(val(node).shape[0]) == str(val(logits).shape[0])
            return node if same else None
    return None


def _sum(graph: fx.Graph, total: fx.Node) -> None:
    given = arguments(total)
    product = given.self
    if not is_call(product, aten.mul.Tensor) or only_user(product) is not total:
        return
    if list(given.dim) != [1] or given.keepdim or val(product).dim() != 3:
        return
    rows, weight = (_source(arg) for arg in product.args[:2])
    if rows is None or weight is None:
        return
    if not is_call(rows, expert_linear.overload, quantized_expert_linear.overload):
        return
    tokens, count, width = val(product).shape
    if [str(n) for n in val(weight).shape] != [str(tokens), str(count)]:
        return
    if str(val(rows).shape[1]) != str(width):
        return
    end = _cast(total) or total
    with graph.inserting_before(end):
        made = emit(graph, sum_experts.overload, rows=rows, weight=weight, dtype=val(end).dtype)
    replace(end, made)
    _add_residual(graph, made)


def _add_residual(graph: fx.Graph, made: fx.Node) -> None:
    """Leave a plain norm of the sum, for the next linear to absorb (fuse_linears)."""
    shaped = only_user(made)
    both = only_user(shaped) if shaped is not None and is_call(shaped, *_RESHAPES) else None
    if shaped is None or both is None or not is_call(both, add_rms_norm.overload):
        return
    given, items = arguments(both), _items(both)
    residual = next((other for sum_, other in operands(both) if sum_ is shaped), None)
    if residual is None or not same_shape(shaped, residual) or len(items) != len(both.users):
        return
    sizes = shaped.args[1] if len(shaped.args) > 1 else None
    if val(made).dtype != val(residual).dtype or not isinstance(sizes, list | tuple):
        return
    with graph.inserting_before(both):
        flat = emit(graph, aten.reshape.default, residual, [-1, val(made).shape[1]])
        total = emit(graph, sum_experts.overload, *positional(made)[:3], flat)
        whole = emit(graph, aten.view.default, total, list(sizes))
        normed = emit(graph, rms_norm.overload, whole, given.weight, given.eps, given.offset)
    for index, value in ((0, normed), (1, whole)):
        if index in items:
            replace(items[index], value)
    graph.erase_node(both)


def _source(node: Any) -> fx.Node | None:
    """What is reshaped to [T, C, N], or gets a last dimension of 1."""
    if not is_call(node, *_RESHAPES, aten.unsqueeze.default):
        return None
    given = arguments(node)
    if is_call(node, aten.unsqueeze.default) and given.dim % 3 != 2:
        return None
    source: fx.Node = given.self
    return source
