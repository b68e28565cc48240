"""`find_convolutions`: a short causal convolution becomes the op for packed sequences."""

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
    same_shape,
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
        u [1, C, T, K] = aten.unfold(aten.pad(x [1, C, T], [K - 1, 0]), 2, K, 1)
    After:
        y^T [T, C] = llmc.causal_conv(x^T [T, C], w [C, K], b, None, ...)
        z^T [T, D, 1] = the same convolutions of the last P + 1 tokens of every token [T, C, P + 1]
        u = the last K tokens of every token [T, C, K]
    """
    graph = gm.graph
    notes = []
    for pad in calls(graph, aten.pad.default, aten.constant_pad_nd.default):
        sizes = _zeros_before(pad)
        if not sizes:
            continue
        if unfold := _unfolded(pad, sizes):
            _by_windows(graph, pad, unfold)
        elif chain := _chain_of_padded(pad, sizes):
            _over_windows(graph, pad, chain)
    for conv in calls(graph, aten.conv1d.default):
        cut = only_user(conv)
        if cut is None or not _is_sequence(conv) or not _is_causal(conv, cut):
            if _over_tokens(conv):
                notes.append(f"{conv.name}: not causal over the last K tokens of each channel")
            continue
        given = arguments(conv)
        with graph.inserting_before(cut):
            tokens = emit(graph, aten.transpose.int, _squeeze(graph, given.input, 0), 0, 1)
            taps = _squeeze(graph, given.weight, 1)
            out = emit(graph, causal_conv.overload, tokens, taps, given.bias, *[None] * 7)
            turned = emit(graph, aten.transpose.int, out, 0, 1)
            batched = emit(graph, aten.unsqueeze.default, turned, 0)
        replace(cut, batched)
    return notes


def _zeros_before(pad: fx.Node) -> int:
    """The number of zeros inserted before the first token of [1, C, T]; 0 for any other padding."""
    sizes, source = arguments(pad).pad, val(arguments(pad).self)
    if source.dim() != 3 or len(sizes) != 2 or sizes[1] != 0 or not pads_zeros(pad):
        return 0
    is_sequence = source.shape[0] == 1 and isinstance(source.shape[2], torch.SymInt)
    return int(sizes[0]) if is_sequence else 0


def _unfolded(pad: fx.Node, left: int) -> fx.Node | None:
    """The call that makes a window of each token and the `left` tokens before it, if it is the only
    reader of the padded sequence."""
    node = only_user(pad)
    if node is not None and is_call(node, aten.slice.Tensor) and same_shape(node, pad):
        node = only_user(node)  # nothing was cut off
    if node is None or not is_call(node, aten.unfold.default):
        return None
    given = arguments(node)
    is_each = given.dimension in (-1, 2) and given.size == left + 1 and given.step == 1
    return node if is_each else None


def _chain_of_padded(pad: fx.Node, left: int) -> list[fx.Node]:
    """Convolutions that together consume the padding before the first token; [] otherwise."""
    chain: list[fx.Node] = []
    node: fx.Node | None = only_user(pad)
    while node is not None and is_call(node, aten.conv1d.default) and left:
        given = arguments(node)
        if (list(given.stride), list(given.padding), list(given.dilation)) != ([1], [0], [1]):
            return []
        chain.append(node)
        left -= val(given.weight).shape[2] - 1
        node = only_user(node)
    return chain if left == 0 else []


def _windows(graph: fx.Graph, pad: fx.Node) -> fx.Node:
    """[T, C, K]: the channels of each token and the K - 1 before it; zeros before the first."""
    given = arguments(pad)
    source, width = given.self, given.pad[0] + 1
    channels = int(val(source).shape[1])
    taps = torch.eye(width, dtype=val(source).dtype).repeat(channels, 1)  # [C * K, K]
    taps_node = add_constant(graph, "taps", taps, pad)
    with graph.inserting_before(pad):
        tokens = emit(graph, aten.transpose.int, _squeeze(graph, source, 0), 0, 1)
        copies = emit(graph, aten.repeat_interleave.self_int, tokens, width, 1)
        moved = emit(graph, causal_conv.overload, copies, taps_node, *[None] * 8)
        return emit(graph, aten.view.default, moved, [-1, channels, width])


def _by_windows(graph: fx.Graph, pad: fx.Node, unfold: fx.Node) -> None:
    windows = _windows(graph, pad)
    with graph.inserting_before(pad):
        turned = emit(graph, aten.transpose.int, windows, 0, 1)
        batched = emit(graph, aten.unsqueeze.default, turned, 0)
    replace(unfold, batched)
    for old in (*pad.users, pad):  # a user is a slice of the whole
        graph.erase_node(old)


def _over_windows(graph: fx.Graph, pad: fx.Node, chain: list[fx.Node]) -> None:
    node = _windows(graph, pad)
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


def _is_sequence(conv: fx.Node) -> bool:
    """Whether its input is [1, C, T]. Others convolve something else, such as features."""
    shape = val(arguments(conv).input).shape
    return len(shape) == 3 and str(shape[0]) == "1" and isinstance(shape[2], torch.SymInt)


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
