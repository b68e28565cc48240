"""`slot_state`: the state of recurrent layers is kept in slots, one per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.decayed_softmax import decayed_softmax
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.linear_recurrence import linear_recurrence
from llmc.kernels.pool_windows import pool_windows
from llmc.kernels.registry import Op
from llmc.kernels.running_max import running_max
from llmc.kernels.selective_scan import selective_scan
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, calls, set_arguments, val
from llmc.passes.inputs import StateInput, add_input, fake_like, step_input, token_input

STATE_OPS: tuple[Op, ...] = (
    causal_conv,
    delta_rule,
    selective_scan,
    linear_recurrence,
    decayed_softmax,
    running_max,
    pool_windows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The state that one recurrent call keeps per request: a tensor of this shape in its slot."""

    call: int  # in execution order
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@graph_pass(required=True)
def slot_state(gm: fx.GraphModule) -> Notes:
    """Give every recurrent call its slots and the bounds of the packed requests.

    A request's slot is the number of its row. A request that begins in this step starts from zero,
    so slots need no clearing when rows are reused or a preempted request restarts.

    Before:
        y = llmc.delta_rule(q, k, v, decay, beta, ..., None, None, None, None)
    After:
        y = llmc.delta_rule(q, k, v, decay, beta, ..., state [slots, H, D, Dv], query_start,
                            context_len, request_row)
    """
    graph = gm.graph
    by_target = {op.overload: op for op in STATE_OPS}
    markers = [n for n in calls(graph, *by_target) if arguments(n).state is None]
    if not markers:
        return []
    names = ("query_start", "context_len", "request_row")
    bounds = {name: step_input(graph, name) for name in names}
    tokens = token_input(graph)
    for call, marker in enumerate(markers):
        op = by_target[marker.target]
        shape, dtype = _state_of(op, marker)
        role = StateInput(call=call, op=op.name)
        fake = fake_like(tokens, 2, *shape, dtype=dtype)
        state = add_input(graph, f"state_{call}", role, fake)
        set_arguments(marker, state=state, **bounds)
    return []


def _state_of(op: Op, marker: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of one slot: float32 if values accumulate over a whole request."""
    given = arguments(marker)
    if op is causal_conv:
        channels, width = val(given.weight).shape
        return (int(channels), int(width) - 1), val(given.x).dtype
    if op is delta_rule:
        heads, v_dim = val(given.value).shape[1:]
        sizes: tuple[int, ...] = (heads, val(given.key).shape[2], v_dim)
    elif op is selective_scan:
        sizes = (*val(given.x).shape[1:], val(given.b).shape[2])
    elif op is decayed_softmax:
        sizes = (3, *val(given.key).shape[1:])
    elif op is pool_windows:
        sizes = (2 * given.series - 1, 3, val(given.bias).shape[1] // given.series)
    else:
        sizes = tuple(val(given.x).shape[1:])
    return tuple(int(n) for n in sizes), torch.float32
