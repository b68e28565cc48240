"""In-place ops of a captured graph -> functional forms, so that passes can rely on values.

Only converted if it makes no difference: the tensor written to must be computed in the graph, and
have no views. Other in-place ops stay; the graph still runs in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmc.passes.edit import aten, emit, update_val, val

# They can return their input or a view of it, although their schemas don't say so.
_MAY_ALIAS = (
    aten.reshape, aten.contiguous, aten.dropout, aten.einsum, aten.atleast_1d, aten.atleast_2d,
    aten.atleast_3d,
)  # fmt: skip


def make_functional(graph: fx.Graph) -> None:
    """x.mul_(y) -> x2 = x.mul(y), and every later reader of x reads x2."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        plain = _plain_form(node)
        base = node.args[0] if node.args else None
        if plain is None or not isinstance(base, fx.Node) or not _is_own(base, order):
            continue
        later = [user for user in base.users if order.get(user, -1) > order[node]]
        node.target = plain
        result = _in_dtype(node, val(base).dtype)
        for user in later:
            user.replace_input_with(base, result)


def _in_dtype(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The new form's result in the dtype of the tensor that the old one wrote to: it promotes."""
    readers = list(node.users)
    update_val(node)
    if val(node).dtype == dtype:
        return node
    with node.graph.inserting_after(node):
        cast = emit(node.graph, aten.to.dtype, node, dtype)
    for reader in readers:
        reader.replace_input_with(node, cast)
    return cast


def _plain_form(node: fx.Node) -> Any:
    """aten.mul.Tensor for aten.mul_.Tensor; None for everything else."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.removeprefix("aten::")
    if target.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, target._overloadname, None)


def _is_own(base: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether it is a computed value that is not a view and has no views."""
    if base.op != "call_function":
        return False
    return not _is_view(base) and not any(_is_view(user) for user in base.users)


def _is_view(node: fx.Node) -> bool:
    """Whether an output can alias an input that is not written to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.op == "call_function"  # a Python function: an item of a list of views
    return (
        any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        or getattr(node.target, "overloadpacket", None) in _MAY_ALIAS
    )
