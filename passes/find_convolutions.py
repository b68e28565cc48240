"""`find_convolutions`: a short causal convolution over the tokens becomes the op that packs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmc.kernels.causal_conv import causal_conv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    is_call,
    only_user,
    pads_zeros,
    positional,
    replace,
    val,
)
from llmc.passes.inputs import add_constant


@graph_pass(required=True)
def find_convolutions(gm: fx.GraphModule) -> Notes:
    """Turn a convolution per channel that sees the last K tokens into `causal_conv`.

    Before:
        y [1, C, T] = aten.slice(aten.conv1d(x [1, C, T], w [C, 1, K], b, padding K - 1, groups C),
                                 2, 0, T)
        z [1, D, T] = convolutions without padding, one after the other, of
                      aten.pad(x [1, C, T], [P, 0])
    After:
        y^T [T, C] = llmc.causal_conv(x^T [T, C], w [C, K], b, None, None, None, None)
        z^T [T, D, 1] = the same convolutions of the last P + 1 tokens of every token [T, C, P + 1]
    """
    graph = gm.graph
    notes = []
    for pad in calls(graph, aten.pad.default, aten.constant_pad_nd.default):
        chain = _chain_of_padded(pad)
        if chain:
            _over_windows(graph, pad, chain)
    for conv in calls(graph, aten.conv1d.default):
        cut = only_user(conv)
        if cut is None or not _is_causal(conv, cut):
            if _over_tokens(conv):
                notes.append(f"{conv.name}: not the last K tokens of each channel")
            continue
        given = arguments(conv)
        with graph.inserting_before(cut):
            tokens = emit(graph, aten.transpose.int, _squeeze(graph, given.input, 0), 0, 1)
            taps = _squeeze(graph, given.weight, 1)
            out = emit(graph, causal_conv.overload, tokens, taps, given.bias, *[None] * 4)
            turned = emit(graph, aten.transpose.int, out, 0, 1)
            batched = emit(graph, aten.unsqueeze.default, turned, 0)
        replace(cut, batched)
    return notes


def _chain_of_padded(pad: fx.Node) -> list[fx.Node]:
    """Convolutions that take the zeros before the first token away again; [] for anything else."""
    sizes = arguments(pad).pad
    if val(pad).dim() != 3 or len(sizes) != 2 or sizes[1] != 0 or not pads_zeros(pad):
        return []
    chain: list[fx.Node] = []
    node: fx.Node | None = only_user(pad)
    left = sizes[0]
    while node is not None and is_call(node, aten.conv1d.default) and left:
        given = arguments(node)
        if (list(given.stride), list(given.padding), list(given.dilation)) != ([1], [0], [1]):
            return []
        chain.append(node)
        left -= val(given.weight).shape[2] - 1
        node = only_user(node)
    whole = bool(chain) and left == 0 and _over_tokens(chain[0])
    return chain if whole and val(arguments(pad).self).shape[0] == 1 else []


def _over_windows(graph: fx.Graph, pad: fx.Node, chain: list[fx.Node]) -> None:
    given = arguments(pad)
    source, width = given.self, given.pad[0] + 1
    channels = int(val(source).shape[1])
    taps = torch.eye(width, dtype=val(source).dtype).repeat(channels, 1)  # [C * K, K]
    taps_node = add_constant(graph, "taps", taps, pad)
    with graph.inserting_before(pad):
        tokens = emit(graph, aten.transpose.int, _squeeze(graph, source, 0), 0, 1)
        copies = emit(graph, aten.repeat_interleave.self_int, tokens, width, 1)
        moved = emit(graph, causal_conv.overload, copies, taps_node, *[None] * 5)
        windows = emit(graph, aten.view.default, moved, [-1, channels, width])
    node: fx.Node = windows
    for conv in chain:
        with graph.inserting_before(conv):
            node = emit(graph, aten.conv1d.default, node, *positional(conv)[1:])
    with graph.inserting_before(chain[-1]):
        turned = emit(graph, aten.transpose.int, _squeeze(graph, node, 2), 0, 1)
        batched = emit(graph, aten.unsqueeze.default, turned, 0)
    replace(chain[-1], batched)
    for old in (*reversed(chain[:-1]), pad):
        graph.erase_node(old)


def _squeeze(graph: fx.Graph, node: Any, dim: int) -> fx.Node:
    return emit(graph, aten.squeeze.dim, node, dim)


def _over_tokens(conv: fx.Node) -> bool:
    return any(isinstance(s, torch.SymInt) for s in val(arguments(conv).input).shape)


def _is_causal(conv: fx.Node, cut: fx.Node) -> bool:
    given = arguments(conv)
    channels, one, width = val(given.weight).shape
    steps = (list(given.stride), list(given.dilation), given.groups, one)
    if steps != ([1], [1], channels, 1):
        return False
    if list(given.padding) != [width - 1] or not is_call(cut, aten.slice.Tensor):
        return False
    sliced = arguments(cut)
    kept = str(val(cut).shape[-1]) == str(val(given.input).shape[-1])
    return kept and sliced.dim in (-1, 2) and sliced.start in (None, 0)
