"""`find_shifts`: values of the token before become the op that knows where requests begin."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from llmc.kernels.causal_conv import causal_conv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, calls, emit, is_call, replace, val
from llmc.passes.inputs import StepInput, add_constant


@graph_pass(required=True)
def find_shifts(gm: fx.GraphModule) -> Notes:
    """Turn a sequence that is moved by one token into a convolution that keeps the last token.

    Before:
        y [1, T, C] = aten.pad(x [1, T, C], [0, 0, 1, -1])
        z [1, T, C] = aten.cat([first [1, 1, C], aten.slice(x, 1, 0, -1)], 1)
    After:
        y [T, C] = llmc.causal_conv(x [T, C], (1, 0) for every channel, None, ...)
        z = aten.where(positions == 0, first, y)
    """
    graph = gm.graph
    for node in calls(graph, aten.pad.default, aten.constant_pad_nd.default, aten.cat.default):
        moved = _moved(node)
        if moved is None:
            continue
        source, first = moved
        with graph.inserting_before(node):
            shifted = _shift(graph, source)
            if first is not None:
                shifted = _starting_with(graph, first, shifted)
        replace(node, shifted)
    return []


def _moved(node: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """(what is moved by one token, what comes first); first None: zeros. None for other nodes."""
    if not _is_sequence(node):
        return None
    given: list[Any] = list(node.args)
    if is_call(node, aten.cat.default):
        parts, dim = (*given, 0)[:2]
        if not isinstance(parts, list | tuple) or len(parts) != 2 or dim not in (1, -2):
            return None
        first, rest = parts
        if not is_call(rest, aten.slice.Tensor) or val(first).shape[1] != 1:
            return None
        source, *cut = rest.args
        return (source, first) if _drops_last(cut) and _is_like(source, node) else None
    source, sizes, *rest = given
    is_zeros = rest[:1] != ["reflect"] and not any(rest[1:])
    same = isinstance(source, fx.Node) and _is_like(source, node)
    return (source, None) if is_zeros and same and list(sizes) == [0, 0, 1, -1] else None


def _is_sequence(node: fx.Node) -> bool:
    """[1, T, C] with T the tokens."""
    shape = val(node).shape
    return len(shape) == 3 and shape[0] == 1 and isinstance(shape[1], torch.SymInt)


def _is_like(source: fx.Node, node: fx.Node) -> bool:
    return [str(s) for s in val(source).shape] == [str(s) for s in val(node).shape]


def _drops_last(cut: list[Any]) -> bool:
    dim, start, end, step = (*cut, 1)[:4]
    return dim in (1, -2) and start in (None, 0) and end == -1 and step == 1


def _shift(graph: fx.Graph, source: fx.Node) -> fx.Node:
    channels = math.prod(int(n) for n in val(source).shape[2:])
    taps = torch.tensor([1.0, 0.0], dtype=val(source).dtype).expand(channels, 2).contiguous()
    flat = emit(graph, aten.squeeze.dim, source, 0)
    taps_node = add_constant(graph, "taps", taps, source)
    moved = emit(graph, causal_conv.overload, flat, taps_node, *[None] * 5)
    return emit(graph, aten.unsqueeze.default, moved, 0)


def _starting_with(graph: fx.Graph, first: fx.Node, shifted: fx.Node) -> fx.Node:
    positions = next(
        n
        for n in graph.nodes
        if n.op == "placeholder" and n.meta["input"] == StepInput(name="positions")
    )
    begins = emit(graph, aten.eq.Scalar, positions, 0)
    rows = emit(graph, aten.view.default, begins, [1, -1, 1])
    return emit(graph, aten.where.self, rows, first, shifted)
