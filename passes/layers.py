"""Which decoder layer each node of a graph belongs to, and the hidden state that leaves each layer.

A model's layers are the longest numbered list among the names of its parameters
(`model.layers.3.mlp...`). A layer ends with the first value after its last weight that is the only
value that later calls depend on. Used by the certificate, by inspection and by user passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.kernels.collectives import embed_shard
from llmc.kernels.quantized_embedding import quantized_embedding
from llmc.passes.edit import CASTS, arguments, aten, emit, is_call, through
from llmc.passes.inputs import StepInput, WeightInput, add_constant, input_of

_READ = (*CASTS, aten.layer_norm.default, aten.rms_norm.default)  # by what follows a layer
_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The decoder layers of a graph.

    `path` is the list's name in the model; `of` is each node's layer: -1 before the layers, `count`
    after them.
    """

    path: str
    count: int
    of: dict[fx.Node, int]
    outputs: dict[int, fx.Node]  # a layer's output, if it is a single value


@dataclass(frozen=True, slots=True)
class _Call:
    """One call in execution order. `alone` is the only live value after it, or None."""

    node: fx.Node
    anchor: int | None  # the layer whose weight it reads; -1 and `count` for others (_anchor)
    alone: fx.Node | None


def layer_list(names: Iterable[str]) -> tuple[str, int]:
    """(path, length) of the longest numbered list of modules; ("", 0) if there is none."""
    members: dict[str, set[int]] = {}
    for name in names:
        if found := _NUMBERED.match(name):
            members.setdefault(found[1], set()).add(int(found[2]))
    if not members:
        return "", 0
    path = max(members, key=lambda p: len(members[p]))
    return path, max(members[path]) + 1


def layer_outputs(graph: fx.Graph) -> list[fx.Node]:
    """The hidden state that leaves each decoder layer, in order.

    Raises CompileError if a layer's output is not a single value, as after some fusions: a pass
    that needs these states should run early.
    """
    layers = find_layers(graph)
    missing = [i for i in range(layers.count) if i not in layers.outputs]
    if missing or not layers.count:
        raise CompileError(
            f"no single value leaves layer {missing[0] if missing else 0}, "
            "so its hidden state can't be found in the graph"
        )
    return [layers.outputs[i] for i in range(layers.count)]


def copy_out(hidden: fx.Node, buffer: Tensor, name: str) -> None:
    """Copy a hidden state [1, T, N] to `buffer[:T]` at every step, where T is its tokens."""
    graph = hidden.graph
    tokens = next(n for n in graph.nodes if n.meta.get("input") == StepInput(name="token_ids"))
    target = add_constant(graph, name, buffer, hidden)
    with graph.inserting_before(hidden.next):
        flat = emit(graph, aten.squeeze.dim, hidden, 0)
        size = emit(graph, aten.sym_size.int, tokens, 0)
        rows = emit(graph, aten.slice.Tensor, target, 0, 0, size)
        emit(graph, aten.copy_.default, rows, flat)


def token_embedding(graph: fx.Graph) -> WeightInput | None:
    """The weight that is looked up by the step's token ids; None if it is not exactly one."""
    tokens = next(n for n in graph.nodes if input_of(n) == StepInput(name="token_ids"))
    found: set[WeightInput] = set()
    for node in graph.nodes:
        lookups = aten.embedding.default, quantized_embedding.overload, embed_shard.overload
        if not is_call(node, *lookups):
            continue
        given = arguments(node)
        ids = given.indices if is_call(node, aten.embedding.default) else given.ids
        role = input_of(given.weight)
        if through(ids, aten.unsqueeze.default) is tokens and isinstance(role, WeightInput):
            found.add(role)
    return found.pop() if len(found) == 1 else None


def find_layers(graph: fx.Graph) -> Layers:
    """Assign every node to a layer; a placeholder belongs to the layer of its first reader."""
    names = [p for n in graph.nodes for p in _parts(n)]
    path, count = layer_list(names)
    calls = list(_calls(graph, path, count))
    of: dict[fx.Node, int] = {}
    outputs: dict[int, fx.Node] = {}
    start = 0
    for layer in range(-1, count):
        end = _end(calls, layer)
        output = calls[end].alone if end >= 0 else None
        if layer >= 0 and output is not None:
            outputs[layer] = output
        of.update((call.node, layer) for call in calls[start : end + 1])
        start = max(start, end + 1)
    of.update((call.node, count) for call in calls[start:])
    of[graph.output_node()] = count
    for node in graph.nodes:
        if node.op == "placeholder":
            of[node] = min((of[user] for user in node.users), default=-1)
    return Layers(path=path, count=count, of=of, outputs=outputs)


def _end(calls: list[_Call], layer: int) -> int:
    """The index of a layer's last call, -1 for none.

    It lies between the layer's last weight and the next layer's first, where only one value is
    live.
    """
    last = max((i for i, c in enumerate(calls) if c.anchor == layer), default=-1)
    if last < 0 and layer >= 0:
        return -1
    later = (i for i, c in enumerate(calls) if i > last and _is_later(c.anchor, layer))
    until = next(later, len(calls))
    cuts = [i for i in range(max(last, 0), until) if calls[i].alone is not None]
    if layer < 0:  # before the layers: rotary tables may be computed after the embedding
        return cuts[-1] if cuts else until - 1
    if not cuts:
        return until - 1
    # The first such value, or what a user pass computed from it; a cast or a norm without weights
    # belongs to its reader.
    return next(
        (i for i in cuts if i + 1 not in cuts or is_call(calls[i + 1].node, *_READ)), cuts[-1]
    )


def _is_later(anchor: int | None, layer: int) -> bool:
    return anchor is not None and anchor > layer


def _parts(node: fx.Node) -> tuple[str, ...]:
    role = input_of(node)
    return role.parts if isinstance(role, WeightInput) else ()


def _calls(graph: fx.Graph, path: str, count: int) -> Iterator[_Call]:
    """Every call with the layer of its weights and the only live value after it.

    Only values computed from weights count: positions, masks and rotary tables are live everywhere.
    """
    nodes = [n for n in graph.nodes if n.op != "placeholder"]
    position = {node: i for i, node in enumerate(nodes)}
    last_use = {n: max((position[u] for u in n.users), default=-1) for n in nodes}
    made: set[fx.Node] = set()  # depends on a weight
    live: set[fx.Node] = set()
    seen_layer = False
    for i, node in enumerate(nodes):
        if node.op == "output":
            return
        anchor = _anchor(node, path, count, seen_layer)
        seen_layer = seen_layer or (anchor is not None and 0 <= anchor < count)
        if anchor is not None or any(source in made for source in node.all_input_nodes):
            made.add(node)
            live.add(node)
        live = {n for n in live if last_use[n] > i}
        yield _Call(node, anchor, _alone(live, node))


def _anchor(node: fx.Node, path: str, count: int, seen_layer: bool) -> int | None:
    """The layer of a call's weights: -1 before the layers (the embedding), `count` after them."""
    found: list[int] = []
    for source in node.all_input_nodes:
        for part in _parts(source):
            number = _NUMBERED.match(part)
            inside = number is not None and number[1] == path
            found.append(int(number[2]) if inside and number else (count if seen_layer else -1))
    return max(found, default=None)


def _alone(live: set[fx.Node], newest: fx.Node) -> fx.Node | None:
    """The only live value. Otherwise the newest, if no other has the shape [1, T, N] of a hidden
    state: keys and values that later layers share stay live too.
    """
    if len(live) == 1:
        [only] = live
        return only if hasattr(only.meta.get("val"), "shape") else None
    hidden = [n for n in live if _is_hidden(getattr(n.meta.get("val"), "shape", ()))]
    return newest if hidden == [newest] else None


def _is_hidden(shape: Sequence[object]) -> bool:
    return len(shape) == 3 and str(shape[0]) == "1"
