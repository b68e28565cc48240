"""`pack_linears`: on CPU, weights of linears are reordered once, at load, for oneDNN."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, calls, emit, only_user, replace, val
from llmc.passes.inputs import WeightInput, add_input, input_of

PACKED_DTYPES = (torch.bfloat16, torch.float16)


def packed_linear_available() -> bool:
    """Whether this build of torch has oneDNN's packed linear."""
    ops = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(ops, "_linear_pointwise")
        and hasattr(ops, "_reorder_linear_weight")
    )


@graph_pass()
def pack_linears(gm: fx.GraphModule, *, unwanted: str | None = None) -> Notes:
    """Run linears over prepacked weights; the plain weight is never kept.

    `unwanted` says why this machine is better served without; then nothing is done.

    Before:
        y = aten.linear(x, w, b)
    After:
        y = mkldnn._linear_pointwise(x, packed w, b, "none", [], "")
    """
    if unwanted is not None:
        return [unwanted]
    graph = gm.graph
    notes = []
    for node in calls(graph, aten.linear.default):
        x, weight, bias = [*node.args, None][:3]
        reason = _why_not(weight)
        if reason:
            notes.append(f"{node.name}: {reason}")
            continue
        assert isinstance(weight, fx.Node)
        role = input_of(weight)
        assert isinstance(role, WeightInput)
        packed = add_input(
            graph, f"{weight.name}_packed", dataclasses.replace(role, packed=True), val(weight)
        )
        with graph.inserting_before(node):
            fast = emit(
                graph, torch.ops.mkldnn._linear_pointwise.default, x, packed, bias, "none", [], ""
            )
        replace(node, fast)
    return notes


def _why_not(weight: object) -> str | None:
    role = input_of(weight)
    if not isinstance(role, WeightInput) or not isinstance(weight, fx.Node):
        return "the weight is computed"
    if val(weight).dtype not in PACKED_DTYPES:
        return f"{val(weight).dtype} gains nothing from packing"
    if only_user(weight) is None:
        return "the weight is shared with another op (tied embedding), which needs it plain"
    return None
