"""Where the ranks' terms are summed: as few collectives as the graph's additions allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import fx

from llmc.kernels.collectives import all_reduce
from llmc.kernels.expert_linear import expert_linear
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    insert_after,
    is_call,
    keeps_order,
    only_user,
    replace,
    same_shape,
    set_arguments,
    val,
)
from llmc.passes.inputs import WeightInput, input_of
from llmc.passes.sharding_rules import RESHAPES


def insert_sum(term: fx.Node, turn: fx.Node) -> None:
    """Sum the ranks' terms. Terms of experts are summed after each token's experts are scaled and
    added up; since their bias is scaled too, it becomes a part of rank 0's term."""
    bias, is_expert = arguments(term).bias, is_call(term, expert_linear.overload)
    if bias is not None and is_expert:
        role = input_of(bias)
        assert isinstance(role, WeightInput), "checked by the rule for experts"
        bias.meta["input"] = dataclasses.replace(role, first_rank=True)
        bias = None
    elif bias is not None:
        set_arguments(term, bias=None)
    last = term
    user = only_user(term) if is_expert else None
    while user is not None and is_call(user, *RESHAPES, aten.mul.Tensor, aten.sum.dim_IntList):
        last = user if is_call(user, aten.sum.dim_IntList) else last
        user = only_user(user)
    total = insert_after(last, all_reduce.overload, turn)
    if bias is not None:
        insert_after(total, aten.add.Tensor, bias)


def join_sums(graph: fx.Graph) -> None:
    """Sum terms that are added to each other by one collective, after that addition.

    Before:
        y = aten.add(aten.add(llmc.all_reduce(a, turn), x), llmc.all_reduce(b, turn))
    After:
        y = aten.add(llmc.all_reduce(aten.add(a, b), turn), x)
    """
    for root in reversed(calls(graph, aten.add.Tensor)):
        if not root.users:  # read by an addition that has been replaced
            graph.erase_node(root)
            continue
        addends = list(_addends(root, root))
        found = [(one, _total(one) if _is_alike(one, root) else None) for one in addends]
        totals = [total for _, total in found if total is not None]
        if len(totals) < 2 or len({*totals}) < len(totals):
            continue
        turn = arguments(totals[0]).turn
        terms = [arguments(total).x if one is total else one for one, total in found if total]
        for total in totals:
            replace(total, arguments(total).x)
        with graph.inserting_before(root):
            joined = terms[0]
            for term in terms[1:]:
                joined = emit(graph, aten.add.Tensor, joined, term)
            joined = emit(graph, all_reduce.overload, joined, turn)
            for other in (one for one, total in found if total is None):
                joined = emit(graph, aten.add.Tensor, joined, other)
        replace(root, joined)


def _addends(node: fx.Node, root: fx.Node) -> Iterator[Any]:
    """What `root` adds up: the operands of `node`, through additions that nothing else reads. Those
    that are not of root's shape and dtype are not looked into, nor are subtractions."""
    if node.kwargs:  # alpha, a factor
        yield node
        return
    for operand in (arguments(node).self, arguments(node).other):
        is_inside = is_call(operand, aten.add.Tensor) and only_user(operand) is node
        if is_inside and _is_alike(operand, root):
            yield from _addends(operand, root)
        else:
            yield operand


def _total(node: fx.Node) -> fx.Node | None:
    """The collective of which an addend is the result, reshaped or scaled; None if there is none,
    or it is read by others too."""
    if only_user(node) is None:
        return None
    if is_call(node, all_reduce.overload):
        return node
    if keeps_order(node):
        return _total(node.all_input_nodes[0])  # the others are sizes
    if is_call(node, aten.mul.Tensor):
        for factor in (arguments(node).self, arguments(node).other):
            if _is_alike(factor, node) and (total := _total(factor)) is not None:
                return total
    return None


def _is_alike(a: Any, b: fx.Node) -> bool:
    return isinstance(a, fx.Node) and same_shape(a, b) and val(a).dtype == val(b).dtype
