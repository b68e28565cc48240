"""`share_routing`: sort a layer's rows by expert once, and read each token's row in place."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from llmc.kernels.expert_linear import expert_linear, sort_experts
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, set_arguments, val

_RESHAPES = (aten.reshape.default, aten.view.default)


@graph_pass()
def share_routing(gm: fx.GraphModule, *, sorts: bool = True) -> Notes:
    """Give the linears of a layer's routed experts one order of its rows, for steps with so many
    that they are sorted, and let them read a token's row without a copy for each of its choices.

    Without `sorts`, for CPUs, whose linears read no order, only the copies are left out.

    Before:
        rows = aten.reshape(aten.expand(aten.unsqueeze(x, 1), [-1, 8, -1]), [-1, K])
        y = llmc.expert_linear(rows, w, None, expert, False)
        z = llmc.expert_linear(act(y), v, None, expert, False)
    After:
        order, offsets = llmc.sort_experts(expert, E)
        y = llmc.expert_linear(x, w, None, expert, False, order, offsets)
        z = llmc.expert_linear(act(y), v, None, expert, False, order, offsets)
    and in the same way with llmc.quantized_expert_linear.
    """
    linears: dict[tuple[fx.Node, int], list[fx.Node]] = {}
    for node in calls(gm.graph, expert_linear.overload, quantized_expert_linear.overload):
        given = arguments(node)
        source = repeated(given.x)
        if source is not None:
            set_arguments(node, x=source)
        if sorts and given.order is None:
            linears.setdefault((given.expert, int(val(given.weight).shape[0])), []).append(node)
    for (expert, experts), readers in linears.items():
        if len(readers) > 1:
            with gm.graph.inserting_before(readers[0]):
                made = emit(gm.graph, sort_experts.overload, expert, experts)
                order, offsets = (emit(gm.graph, operator.getitem, made, i) for i in (0, 1))
            for node in readers:
                set_arguments(node, order=order, offsets=offsets)
    return []


def repeated(rows: Any) -> fx.Node | None:
    """x [T, K] if `rows` [C T, K] are its rows, each C times in a row."""
    if not is_call(rows, *_RESHAPES):
        return None
    expanded = arguments(rows).self
    if not is_call(expanded, aten.expand.default):
        return None
    unsqueezed = arguments(expanded).self
    if not is_call(unsqueezed, aten.unsqueeze.default) or arguments(unsqueezed).dim % 3 != 1:
        return None
    x: fx.Node = arguments(unsqueezed).self
    tokens, width = (str(n) for n in val(x).shape) if val(x).dim() == 2 else ("", "")
    shape = [str(n) for n in val(expanded).shape]
    same = [shape[0], shape[-1]] == [tokens, width] and len(shape) == 3
    return x if same and [str(n) for n in val(rows).shape[1:]] == [width] else None
