"""`lower_kernels`: replace each op with the fastest implementation that supports its arguments.

It is the last pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import fx

from llmc.kernels.registry import OPS, PREFER, Op
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, positional

_Call = tuple[str, tuple[Any, ...]]


def _gelu(given: SimpleNamespace) -> _Call:
    is_tanh = getattr(given, "approximate", "none") == "tanh"
    return "activate", (given.self, "gelu_tanh" if is_tanh else "gelu")


# Torch ops that one of our ops can replace -> its name and arguments, if it can.
_OF_TORCH: dict[Any, Callable[[SimpleNamespace], _Call | None]] = {
    aten.linear.default: lambda given: ("linear", (given.input, given.weight, given.bias)),
    aten.bmm.default: lambda given: ("bmm", (given.self, given.mat2)),
    aten.gelu.default: _gelu,
    aten.silu.default: lambda given: ("activate", (given.self, "silu")),
    aten.relu.default: lambda given: ("activate", (given.self, "relu")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """A call of one of our ops, or of a torch op that it can replace."""

    op: Op
    args: tuple[Any, ...]
    of_torch: bool


def op_calls(graph: fx.Graph) -> Iterator[tuple[fx.Node, OpCall | None]]:
    """Every call in the graph, with None for those that are not one of our ops."""
    by_target = {op.overload: op for op in OPS.values()}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in by_target:
            op = by_target[node.target]
            yield node, OpCall(op=op, args=positional(node), of_torch=False)
            continue
        replace = _OF_TORCH.get(node.target)
        name, args = (replace and replace(arguments(node))) or ("", ())
        yield node, OpCall(op=OPS[name], args=args, of_torch=True) if name in OPS else None


@graph_pass(required=True)
def lower_kernels(gm: fx.GraphModule, *, prefer: Sequence[str] = PREFER) -> Notes:
    """Select the implementation of every llmc op in the graph, and of torch ops that we have too.

    Before:
        o = llmc.paged_attention(q, ...);  y = aten.gelu(o)
    After:
        o = llmc_cpu.paged_attention(q, ...);  y = llmc_cpu.activate(o, "gelu")
    """
    notes = []
    slow: dict[str, int] = {}
    for node, call in op_calls(gm.graph):
        if call is None:
            continue
        args = fx.node.map_arg(call.args, lambda n: n.meta.get("val"))
        impl = call.op.best(args, prefer=prefer)
        if impl is not None:
            node.target, node.args, node.kwargs = impl.op(), call.args, {}
        elif not call.of_torch:  # torch's own op is not a slow reference
            slow[call.op.name] = slow.get(call.op.name, 0) + 1
    notes += [f"{count} {name} use the slow reference" for name, count in slow.items()]
    return notes
