"""`fuse_act_mul`: fuse a gated activation, so that it reads the merged projection once."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from llmc.kernels.act_mul import act_mul
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, operands, replace, val


@graph_pass()
def fuse_act_mul(gm: fx.GraphModule) -> Notes:
    """Fuse activation and gate over the two halves of one tensor.

    Before:
        gate, up = aten.split_with_sizes(gate_up, [n, n], -1)
        y = aten.mul(aten.silu(gate), up)
    After:
        y = llmc.act_mul(gate_up, "silu")
    """
    graph = gm.graph
    for node in calls(graph, aten.mul.Tensor):
        for activated, up in operands(node):
            act = _activation(activated)
            source = _halves(arguments(activated).self, up) if act else None
            if act and source is not None:
                with graph.inserting_before(node):
                    fused = emit(graph, act_mul.overload, source, act)
                replace(node, fused)
                break
    return []


def _activation(node: Any) -> str | None:
    if is_call(node, aten.silu.default):
        return "silu"
    if is_call(node, aten.gelu.default):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(node.kwargs.get("approximate", "none"))
    return None


def _halves(gate: Any, up: Any) -> fx.Node | None:
    """The tensor whose first half is `gate` and second half is `up`, if there is one."""
    if not (is_call(gate, operator.getitem) and is_call(up, operator.getitem)):
        return None
    first, second = arguments(gate), arguments(up)
    split = first.source
    if second.source is not split or (first.index, second.index) != (0, 1):
        return None
    if not is_call(split, aten.split_with_sizes.default, aten.chunk.default):
        return None
    given = arguments(split)
    if is_call(split, aten.chunk.default):
        are_halves = given.chunks == 2
    else:
        are_halves = len(given.split_sizes) == 2 and len(set(given.split_sizes)) == 1
    source: fx.Node = given.self
    return source if are_halves and given.dim in (-1, val(source).dim() - 1) else None
