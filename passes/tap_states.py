"""`tap_states`: keep hidden states between layers in paged caches, for a draft head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from llmc.errors import CompileError
from llmc.kernels.write_kv import write_kv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, emit, val
from llmc.passes.inputs import CacheInput, add_input, input_of, step_input
from llmc.passes.layers import layer_outputs

_TAP = "tap_{}"


@graph_pass(required=True)
def tap_states(gm: fx.GraphModule, *, layers: Sequence[int], block_size: int) -> Notes:
    """Cache each token's hidden state that enters these layers, in the slot of its keys and values.

    `layers` count from 0; the number of layers, or -1, means the output of the last one. () means
    the third layer, the middle one and the third from the end, as in EAGLE-3. The caches are
    numbered after those of attention. Raises CompileError if the model has no such layer, or if no
    single value enters it.

    Before:
        h [1, T, N] = the output of a layer
    After:
        llmc.write_kv(h [T, 1, N], h[..., :0], tap_0 [blocks, 1, block_size, N], ..., slot_mapping)
    """
    graph = gm.graph
    outputs = layer_outputs(graph)
    count = len(outputs)
    wanted = [count if layer == -1 else layer for layer in layers or (2, count // 2, count - 3)]
    if not all(1 <= layer <= count for layer in wanted):
        raise CompileError(
            f"the draft head reads the inputs of layers {', '.join(map(str, wanted))} (counted "
            f"from 0), and the model has {count} layers; heads can read from 1 to {count}"
        )
    slots = step_input(graph, "slot_mapping")
    for number, layer in enumerate(wanted):
        _tap(graph, outputs[layer - 1], number, slots, block_size)
    return []


def _tap(graph: fx.Graph, hidden: fx.Node, number: int, slots: fx.Node, block_size: int) -> None:
    roles = [input_of(n) for n in graph.nodes if n.op == "placeholder"]
    layer = 1 + max((role.layer for role in roles if isinstance(role, CacheInput)), default=-1)
    width = int(val(hidden).shape[2])
    empty = val(hidden).new_empty
    key = CacheInput(layer=layer, part="key")
    value = CacheInput(layer=layer, part="value")
    caches = (
        add_input(graph, _TAP.format(number), key, empty(2, 1, block_size, width)),
        add_input(graph, f"{_TAP.format(number)}_rest", value, empty(2, 1, block_size, 0)),
    )
    with graph.inserting_before(hidden.next):
        states = emit(graph, aten.unsqueeze.default, emit(graph, aten.squeeze.dim, hidden, 0), 1)
        none = emit(graph, aten.slice.Tensor, states, 2, 0, 0)
        emit(graph, write_kv.overload, states, none, *caches, slots)


def tap_names(graph: fx.Graph) -> list[str]:
    """The placeholders of the caches that `tap_states` made, in order."""
    names = {node.name for node in graph.nodes if node.op == "placeholder"}
    found: list[str] = []
    while (name := _TAP.format(len(found))) in names:
        found.append(name)
    return found
