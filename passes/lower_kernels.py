"""`lower_kernels`: replace each op with the fastest implementation that supports its arguments.

It is the last pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from llmc.kernels.registry import OPS, PREFER
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import positional

# Torch ops that one of our ops can replace, with the same arguments.
SAME_AS = {torch.ops.aten.linear.default: "linear", torch.ops.aten.bmm.default: "bmm"}


@graph_pass(required=True)
def lower_kernels(gm: fx.GraphModule, *, prefer: Sequence[str] = PREFER) -> Notes:
    """Select the implementation of every llmc op in the graph.

    Before:
        o = llmc.paged_attention(q, ...)
    After:
        o = llmc_cpu.paged_attention(q, ...)
    """
    by_target = {op.overload: op for op in OPS.values()}
    by_target |= {target: OPS[name] for target, name in SAME_AS.items() if name in OPS}
    notes = []
    slow: dict[str, int] = {}
    for node in gm.graph.nodes:
        op = by_target.get(node.target) if node.op == "call_function" else None
        if op is None:
            continue
        if node.target in SAME_AS:
            node.args = positional(node)  # linear's bias may be omitted
        args = fx.node.map_arg(node.args, lambda n: n.meta.get("val"))
        impl = op.best(args, prefer=prefer)
        if impl is None and node.target in SAME_AS:
            continue  # torch's own op is not a slow reference
        if impl is None:
            slow[op.name] = slow.get(op.name, 0) + 1
        else:
            node.target = impl.op()
    notes += [f"{count} {name} use the slow reference" for name, count in slow.items()]
    return notes
