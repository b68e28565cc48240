"""`fold_weights`: what is computed from one parameter alone is computed when it is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import fx

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
    replace,
    val,
)
from llmc.passes.inputs import WeightInput, add_input, fake_like, input_of, placeholder_of

_NAMES: Mapping[Any, str] = {aten.exp.default: "exp", aten.neg.default: "neg"}


@graph_pass()
def fold_weights(gm: fx.GraphModule) -> Notes:
    """Compute functions of one parameter while it is loaded, not in every step.

    Recurrent layers store the logarithms of their decay rates, and some models the weights of
    LayerNorms less one.

    Before:
        a [H] = aten.neg(aten.exp(aten.to(A_log, float32)))
        y = aten.layer_norm(x, [N], aten.add(w, 1), b)
    After:
        a [H], a weight: -exp(A_log in float32)
        y = aten.layer_norm(x, [N], u, b), with u [N], a weight: w + 1
    """
    graph = gm.graph
    for node in calls(graph, *_NAMES, aten.add.Tensor):
        name = _NAMES.get(node.target) or ("plus_one" if _is_weight_less_one(node) else None)
        if name is None:
            continue
        casts: list[str] = []
        reshapes: list[fx.Node] = []
        base: Any = node.args[0]
        while keeps_order(base) or is_call(base, *CASTS):
            if is_call(base, *CASTS) and val(base).dtype != val(base.args[0]).dtype:
                casts.insert(0, str(val(base).dtype).removeprefix("torch."))
            elif keeps_order(base):
                reshapes.insert(0, base)
            base = base.args[0]
        role = input_of(base)
        if not isinstance(role, WeightInput) or role.quantized or role.first_rank:
            continue
        start = role.functions or (str(val(base).dtype).removeprefix("torch."),)
        functions = (*start, *casts, name)
        weight = _weight(graph, dataclasses.replace(role, functions=functions), base, node)
        with graph.inserting_before(node):
            for reshape in reshapes:
                weight = emit(graph, reshape.target, weight, *reshape.args[1:])
        replace(node, weight)
    return []


def _is_weight_less_one(node: fx.Node) -> bool:
    """Whether a sum with 1 is a LayerNorm's weight. Ops of RMSNorms have an offset for it."""
    reader = only_user(node)
    return (
        node.args[1:] == (1,)
        and not node.kwargs
        and is_call(reader, aten.layer_norm.default)
        and arguments(reader).weight is node  # type: ignore[arg-type]
    )


def _weight(graph: fx.Graph, role: WeightInput, base: fx.Node, like: fx.Node) -> fx.Node:
    """The placeholder of a recipe, which layers that share the parameter share too."""
    node = placeholder_of(graph, role)
    if node is not None:
        return node
    fake = fake_like(base, *val(base).shape, dtype=val(like).dtype)
    return add_input(graph, f"{base.name}_{role.functions[-1]}", role, fake)
