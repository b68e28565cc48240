"""`fuse_convolutions`: a recurrent op takes over the short convolution of all its inputs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.conv_recurrence import conv_delta_rule, conv_scan
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.selective_scan import selective_scan
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import RESHAPES, arguments, aten, calls, emit, is_call, replace, val
from llmc.passes.evaluate import NotEvaluable, evaluate, token_counts

# which arguments of each op come from the convolution, in the order of its channels
_RECURRENCES = (
    (delta_rule, conv_delta_rule, ("query", "key", "value")),
    (selective_scan, conv_scan, ("x", "b", "c")),
)
_STEP = ("query_start", "context_len", "request_row")
_MOVES = (
    *RESHAPES, aten.select.int, aten.slice.Tensor, aten.transpose.int, aten.permute.default,
    aten.t.default, aten.numpy_T.default, aten.split_with_sizes.default, operator.getitem,
)  # fmt: skip
_TOKENS = 3  # of the proof: tokens and channels can't be confused


@graph_pass()
def fuse_convolutions(gm: fx.GraphModule, *, unwanted: str | None = None) -> Notes:
    """Launch one kernel for a recurrent layer's convolution and recurrence where each request has
    one token. The op itself handles other steps differently.

    Before:
        y = llmc.causal_conv(x, w, b, "silu", s, ...)
        q, k, v = aten.split_with_sizes(y, [G * D, G * D, H * Dv], 1)
        o = llmc.delta_rule(q, k, v, a, c, scale, eps, rate, bias, 1.0, t, ...)
        x, b, c = aten.split_with_sizes(y, [H * P, G * N, G * N], 1)
        o = llmc.selective_scan(x, dt, a, b, c, ...)
    After:
        o = llmc.conv_delta_rule(x, w, b, "silu", s, G, a, c, scale, eps, rate, bias, 1.0, t, ...)
        o = llmc.conv_scan(x, w, b, "silu", s, G, dt, a, ...)
    """
    if unwanted is not None:
        return [unwanted]
    notes = []
    for recurrence, fused, names in _RECURRENCES:
        for node in calls(gm.graph, recurrence.overload):
            reason = _fuse(gm.graph, node, fused.overload, names)
            if reason is not None:
                notes.append(f"{node.name}: {reason}")
    return notes


def _fuse(graph: fx.Graph, node: fx.Node, fused: Any, names: tuple[str, ...]) -> str | None:
    """Fuse a recurrence with the convolution before it, if there is one; the reason why not."""
    given = arguments(node)
    inputs = [getattr(given, name) for name in names]
    paths = [_path(part) for part in inputs]
    conv = paths[0][-1]
    if not is_call(conv, causal_conv.overload):
        return None
    before = arguments(conv)
    if before.state is None or any(getattr(before, n) is not getattr(given, n) for n in _STEP):
        return "its convolution is over other sequences"
    moved = {one for path in paths for one in path}
    if any(user not in moved and user is not node for one in moved for user in one.users):
        return "its convolution is also read elsewhere"
    if not _reads_in_order(graph, conv, inputs):
        return "it does not read all channels of its convolution in order"
    rest = {name: value for name, value in vars(given).items() if name not in names}
    with graph.inserting_before(node):
        made = emit(
            graph,
            fused,
            x=before.x,
            conv_weight=before.weight,
            conv_bias=before.bias,
            conv_act=before.act,
            conv_state=before.state,
            groups=val(inputs[1]).shape[1],
            **rest,
        )
    replace(node, made)
    for one in (one for path in paths for one in path):
        if not one.users and one in graph.nodes:
            graph.erase_node(one)
    return None


def _path(part: fx.Node) -> list[fx.Node]:
    """The calls that give `part` its shape, then the value of which it is a part."""
    path = [part]
    while is_call(path[-1], *_MOVES):
        path.append(path[-1].args[0])  # type: ignore[arg-type]
    return path


def _reads_in_order(graph: fx.Graph, conv: fx.Node, parts: list[fx.Node]) -> bool:
    """Whether the parts are all channels of the convolution, in order, for every token."""
    numbers = torch.arange(_TOKENS * val(conv).shape[1]).view(_TOKENS, -1)
    known = {conv: numbers, **token_counts(graph, _TOKENS)}
    try:
        read = [evaluate(graph, part, _TOKENS, known).reshape(_TOKENS, -1) for part in parts]
    except NotEvaluable:
        return False
    return torch.equal(torch.cat(read, 1), numbers)
