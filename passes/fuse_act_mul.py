"""`fuse_act_mul`: the gated activation reads the merged projection once."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from llmc.kernels.act_mul import act_mul
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, calls, emit, is_call, operands, replace


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
            source = _halves(activated.args[0], up) if act else None
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
        approximate = node.kwargs.get("approximate", "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    return None


def _halves(gate: Any, up: Any) -> fx.Node | None:
    """The tensor whose first half is `gate` and second half is `up`, if there is one."""
    if not (is_call(gate, operator.getitem) and is_call(up, operator.getitem)):
        return None
    split = gate.args[0]
    if up.args[0] is not split or (gate.args[1], up.args[1]) != (0, 1):
        return None
    if is_call(split, aten.split_with_sizes.default):
        sizes, dim = split.args[1], split.args[2] if len(split.args) > 2 else 0
        if len(sizes) != 2 or sizes[0] != sizes[1]:
            return None
    elif is_call(split, aten.chunk.default):
        count, dim = split.args[1], split.args[2] if len(split.args) > 2 else 0
        if count != 2:
            return None
    else:
        return None
    source: fx.Node = split.args[0]
    return source if dim in (-1, source.meta["val"].dim() - 1) else None
