"""`read_taps`: a draft head reads the hidden states of its target model, and its own."""

from __future__ import annotations

from torch import fx

from llmc.kernels.draft_states import CARRIED, LEFT, draft_states
from llmc.kernels.step_inputs import of_group
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, replace, val
from llmc.passes.inputs import StateInput, TapInput, add_input, fake_like, step_input
from llmc.pooling import DRAFTED


@graph_pass(required=True)
def read_taps(gm: fx.GraphModule, *, block_size: int) -> Notes:
    """Read the hidden states that `tap_states` cached for a token in the target model, whose block
    table is the second one of each row here. The state of a row's last token is written to the
    row's slot.

    Before:
        h [1, T, N] = llmc.draft_states(x, 0)
        y [1, T, N] = llmc.draft_states(g, CARRIED)
        z [1, T, N] = llmc.draft_states(u, LEFT)
    After:
        h = aten.index_select(tap_0 [blocks * block_size, N], 0, slot_mapping_1)
        y = g, and at logits_index, where the token is drafted, state[row]
        aten.index_copy_(state [slots, N], 0, row, u at logits_index)
    """
    graph = gm.graph
    markers = {arguments(n).place: n for n in calls(graph, draft_states.overload)}
    taps = [markers[place] for place in sorted(markers) if place >= 0]
    if not taps:
        return []
    mapping = step_input(graph, of_group("slot_mapping", 1))
    with graph.inserting_before(taps[0]):
        # rows of padding, and of tokens that the head drafted itself, are read but not used
        slots = emit(graph, aten.clamp.default, mapping, 0)
    for number, marker in enumerate(taps):
        with graph.inserting_before(marker):
            replace(marker, _tapped(graph, marker, number, slots, block_size))
    carried, left = markers[CARRIED], markers[LEFT]
    fake = fake_like(left, 2, val(left).shape[2], dtype=val(left).dtype)
    role = StateInput(call=0, op="draft_states")
    state = add_input(graph, "left_states", role, fake)
    for marker, make in ((carried, _carried), (left, _left)):
        with graph.inserting_before(marker):
            replace(marker, make(graph, arguments(marker).hidden, state))
    return []


def _tapped(
    graph: fx.Graph, marker: fx.Node, number: int, slots: fx.Node, block_size: int
) -> fx.Node:
    width = val(marker).shape[2]
    fake = fake_like(marker, 2, 1, block_size, width, dtype=val(marker).dtype)
    cache = add_input(graph, f"tap_{number}", TapInput(number=number), fake)
    flat = emit(graph, aten.view.default, cache, [-1, width])
    rows = emit(graph, aten.index_select.default, flat, 0, slots)
    return emit(graph, aten.unsqueeze.default, rows, 0)


def _carried(graph: fx.Graph, hidden: fx.Node, state: fx.Node) -> fx.Node:
    """A draft token is its request's only token in a step, so it is the one that is sampled."""
    row, index = step_input(graph, "row"), step_input(graph, "logits_index")
    flat = emit(graph, aten.squeeze.dim, hidden, 0)
    own = emit(graph, aten.index_select.default, flat, 0, index)
    left = emit(graph, aten.index_select.default, state, 0, row)
    tokens = emit(graph, aten.index_select.default, step_input(graph, "token_ids"), 0, index)
    drafted = emit(graph, aten.unsqueeze.default, emit(graph, aten.ge.Scalar, tokens, DRAFTED), 1)
    chosen = emit(graph, aten.where.self, drafted, left, own)
    return emit(
        graph,
        aten.unsqueeze.default,
        emit(graph, aten.index_copy.default, flat, 0, index, chosen),
        0,
    )


def _left(graph: fx.Graph, hidden: fx.Node, state: fx.Node) -> fx.Node:
    flat = emit(graph, aten.squeeze.dim, hidden, 0)
    own = emit(graph, aten.index_select.default, flat, 0, step_input(graph, "logits_index"))
    emit(graph, aten.index_copy_.default, state, 0, step_input(graph, "row"), own)
    return hidden
