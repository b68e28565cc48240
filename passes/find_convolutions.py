"""`find_convolutions`: a short causal convolution over the tokens becomes the op that packs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmc.kernels.causal_conv import causal_conv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, calls, emit, is_call, only_user, replace, val


@graph_pass(required=True)
def find_convolutions(gm: fx.GraphModule) -> Notes:
    """Turn a convolution per channel that sees the last K tokens into `causal_conv`.

    Before:
        y [1, C, T] = aten.slice(aten.conv1d(x [1, C, T], w [C, 1, K], b, padding K - 1, groups C),
                                 2, 0, T)
    After:
        y^T [T, C] = llmc.causal_conv(x^T [T, C], w [C, K], b, None, None, None, None)
    """
    graph = gm.graph
    notes = []
    for conv in calls(graph, aten.conv1d.default):
        cut = only_user(conv)
        if cut is None or not _is_causal(conv, cut):
            if _over_tokens(conv):
                notes.append(f"{conv.name}: not the last K tokens of each channel")
            continue
        x, weight, bias = (*conv.args, None)[:3]
        with graph.inserting_before(cut):
            tokens = emit(graph, aten.transpose.int, _squeeze(graph, x, 0), 0, 1)
            taps = _squeeze(graph, weight, 1)
            out = emit(graph, causal_conv.overload, tokens, taps, bias, *[None] * 4)
            turned = emit(graph, aten.transpose.int, out, 0, 1)
            batched = emit(graph, aten.unsqueeze.default, turned, 0)
        replace(cut, batched)
    return notes


def _squeeze(graph: fx.Graph, node: Any, dim: int) -> fx.Node:
    return emit(graph, aten.squeeze.dim, node, dim)


def _over_tokens(conv: fx.Node) -> bool:
    return any(isinstance(s, torch.SymInt) for s in val(conv.args[0]).shape)


def _is_causal(conv: fx.Node, cut: fx.Node) -> bool:
    given: list[Any] = list(conv.args)
    defaults: list[Any] = [None, None, None, [1], [0], [1], 1]
    x, weight, _, stride, padding, dilation, groups = given + defaults[len(given) :]
    channels, one, width = val(weight).shape
    if (list(stride), list(dilation), groups, one) != ([1], [1], channels, 1):
        return False
    if list(padding) != [width - 1] or not is_call(cut, aten.slice.Tensor):
        return False
    sliced: list[Any] = [*cut.args, None, None]
    dim, start = sliced[1:3]
    kept = str(val(cut).shape[-1]) == str(val(x).shape[-1])
    return kept and dim in (-1, 2) and start in (None, 0)
