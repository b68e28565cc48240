"""`running_pool` and `pool`: return a vector for each request instead of a sampled token."""

from __future__ import annotations

import torch
from torch import fx

from llmc.kernels.linear_recurrence import linear_recurrence
from llmc.kernels.pool_tokens import pool_tokens
from llmc.kernels.running_max import running_max
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, calls, emit, replace, val
from llmc.passes.inputs import step_input
from llmc.pooling import Method


@graph_pass(required=True)
def running_pool(gm: fx.GraphModule, *, method: Method) -> Notes:
    """Give every token the pooled value of its request up to that token, so that the last token has
    the result for the whole request.

    Sums are carried from one chunk of a prompt to the next by `linear_recurrence` without decay,
    and maximums by `running_max`; `slot_state` then gives them a slot for each request. The picture
    is for `mean`.

    Before:
        pooled [1, T, N] = llmc.pool_tokens(hidden [1, T, N])
    After:
        total [T, N] = llmc.linear_recurrence(hidden[0].float() * weight [T, 1], ones, None ...)
        pooled [1, T, N] = (total / divisor [T, 1])[None]
    """
    graph = gm.graph
    for marker in calls(graph, pool_tokens.overload):
        (hidden,) = marker.args
        assert isinstance(hidden, fx.Node)
        replace(marker, hidden if method == "last" else _pooled(graph, marker, hidden, method))
    return []


def _pooled(graph: fx.Graph, marker: fx.Node, hidden: fx.Node, method: Method) -> fx.Node:
    positions = step_input(graph, "positions")
    with graph.inserting_before(marker):
        flat = emit(graph, aten.squeeze.dim, hidden, 0)
        values = emit(graph, aten.to.dtype, flat, torch.float32)
        place = emit(graph, aten.unsqueeze.default, positions, 1)
        count = emit(graph, aten.add.Scalar, emit(graph, aten.to.dtype, place, torch.float32), 1)
        if method == "cls":
            first = emit(graph, aten.eq.Scalar, place, 0)
            values = emit(
                graph, aten.mul.Tensor, values, emit(graph, aten.to.dtype, first, torch.float32)
            )
        elif method == "weightedmean":
            values = emit(graph, aten.mul.Tensor, values, count)
        if method == "max":
            total = emit(graph, running_max.overload, values, None, None, None, None)
        else:
            still = emit(graph, aten.ones_like.default, values)
            total = emit(graph, linear_recurrence.overload, values, still, None, None, None, None)
        divisor = _divisor(graph, method, count)
        if divisor is not None:
            total = emit(graph, aten.div.Tensor, total, divisor)
        if any(user.op != "output" for user in marker.users):  # more layers of the model follow
            total = emit(graph, aten.to.dtype, total, val(hidden).dtype)
        return emit(graph, aten.unsqueeze.default, total, 0)


def _divisor(graph: fx.Graph, method: Method, count: fx.Node) -> fx.Node | None:
    """[T, 1]: the divisor of the sum up to each token."""
    if method == "mean":
        return count
    if method == "mean_sqrt_len":
        return emit(graph, aten.sqrt.default, count)
    if method == "weightedmean":  # 1 + 2 + ... + count
        pairs = emit(graph, aten.mul.Tensor, count, emit(graph, aten.add.Scalar, count, 1))
        return emit(graph, aten.div.Scalar, pairs, 2)
    return None


@graph_pass(required=True)
def pool(gm: fx.GraphModule) -> Notes:
    """Return the vectors of the selected rows. A token of 0 means that a vector is finite, -1 that
    it is not.

    Before:
        return rows [S, N]
    After:
        vector [S, N] = rows.float()
        token [S] = isfinite(vector).all(-1).long() - 1
        return token, vector
    """
    graph = gm.graph
    output = graph.output_node()
    rows = output.args[0]
    assert isinstance(rows, fx.Node)
    assert val(rows).dim() == 2, "last_token_logits selects rows"
    with graph.inserting_before(output):
        vector = emit(graph, aten.to.dtype, rows, torch.float32)
        # a sum with NaN or infinity times 0 is NaN; a finite one is 0
        zero = emit(graph, aten.sum.dim_IntList, emit(graph, aten.mul.Scalar, vector, 0), [-1])
        is_finite = emit(graph, aten.eq.Scalar, zero, 0)
        token = emit(graph, aten.sub.Scalar, emit(graph, aten.to.dtype, is_finite, torch.int64), 1)
    output.args = ((token, vector),)
    return []
