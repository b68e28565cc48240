"""`find_shifts`: a shift by one token becomes an op that knows where requests begin."""

from __future__ import annotations

import math

import torch
from torch import fx

from llmc.kernels.causal_conv import causal_conv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, pads_zeros, replace, val
from llmc.passes.inputs import StepInput, add_constant, placeholder_of


@graph_pass(required=True)
def find_shifts(gm: fx.GraphModule) -> Notes:
    """Turn a sequence shifted by one token into a convolution, which keeps each request's last
    token as state.

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
    """(sequence that is shifted by one token, its new first row or None for zeros); None for other
    nodes."""
    if not _is_sequence(node):
        return None
    given = arguments(node)
    if is_call(node, aten.cat.default):
        if len(given.tensors) != 2 or given.dim not in (1, -2):
            return None
        first, rest = given.tensors
        if not is_call(rest, aten.slice.Tensor) or val(first).shape[1] != 1:
            return None
        source = arguments(rest).self
        return (source, first) if _drops_last(rest) and _is_like(source, node) else None
    moves = list(given.pad) == [0, 0, 1, -1] and pads_zeros(node)
    return (given.self, None) if moves and _is_like(given.self, node) else None


def _is_sequence(node: fx.Node) -> bool:
    """Whether it is [1, T, C], where T is the number of tokens."""
    shape = val(node).shape
    return len(shape) == 3 and shape[0] == 1 and isinstance(shape[1], torch.SymInt)


def _is_like(source: fx.Node, node: fx.Node) -> bool:
    return [str(s) for s in val(source).shape] == [str(s) for s in val(node).shape]


def _drops_last(cut: fx.Node) -> bool:
    given = arguments(cut)
    is_over_tokens = given.dim in (1, -2) and given.step == 1
    return is_over_tokens and given.start in (None, 0) and given.end == -1


def _shift(graph: fx.Graph, source: fx.Node) -> fx.Node:
    channels = math.prod(int(n) for n in val(source).shape[2:])
    taps = torch.tensor([1.0, 0.0], dtype=val(source).dtype).expand(channels, 2).contiguous()
    flat = emit(graph, aten.squeeze.dim, source, 0)
    taps_node = add_constant(graph, "taps", taps, source)
    moved = emit(graph, causal_conv.overload, flat, taps_node, *[None] * 8)
    return emit(graph, aten.unsqueeze.default, moved, 0)


def _starting_with(graph: fx.Graph, first: fx.Node, shifted: fx.Node) -> fx.Node:
    positions = placeholder_of(graph, StepInput(name="positions"))
    assert positions is not None, "every graph has it"
    begins = emit(graph, aten.eq.Scalar, positions, 0)
    rows = emit(graph, aten.view.default, begins, [1, -1, 1])
    return emit(graph, aten.where.self, rows, first, shifted)
