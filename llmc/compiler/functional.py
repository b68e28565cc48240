"""In-place ops of a captured graph -> functional forms, so that passes can rely on values.

Only converted if it makes no difference: the tensor written to must be computed in the graph, and
have no views. Other in-place ops stay; the graph still runs in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def make_functional(graph: fx.Graph) -> None:
    """x.mul_(y) -> x2 = x.mul(y), and every later reader of x reads x2."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        plain = _plain_form(node)
        base = node.args[0] if node.args else None
        if plain is None or not isinstance(base, fx.Node) or not _is_own(base, order):
            continue
        node.target = plain
        for user in list(base.users):
            if user is not node and order[user] > order[node]:
                user.replace_input_with(base, node)


def _plain_form(node: fx.Node) -> Any:
    """aten.mul.Tensor for aten.mul_.Tensor; None for everything else."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.removeprefix("aten::")
    if target.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, target._overloadname, None)


def _is_own(base: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether it is a computed value that is not a view and has no views."""
    if base.op != "call_function":
        return False
    return not _is_view(base) and not any(_is_view(user) for user in base.users)


def _is_view(node: fx.Node) -> bool:
    """Whether, by its schema, an output aliases an input that is not written to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.op == "call_function"  # a Python function: an item of a list of views
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    ) or node.target in (torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default)
