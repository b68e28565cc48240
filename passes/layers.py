"""Which decoder layer each node of a graph belongs to, and the hidden state that leaves each layer.

A model's layers are the longest numbered list among the names of its parameters
(`model.layers.3.mlp...`). A layer ends with the first value behind its last weight on which, alone,
everything later depends. Shared by the certificate, by inspection and by passes of users.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.kernels.quantized_embedding import quantized_embedding
from llmc.passes.edit import arguments, aten, emit, is_call, through
from llmc.passes.inputs import StepInput, WeightInput, add_constant, input_of

_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """`path` is the list's name in the model; `of` has -1 before it and `count` behind it."""

    path: str
    count: int
    of: dict[fx.Node, int]
    outputs: dict[int, fx.Node]  # what leaves a layer, where it is a single value


@dataclass(frozen=True, slots=True)
class _Call:
    """One call in execution order. `alone` is the one value that lives on behind it, if any."""

    node: fx.Node
    anchor: int | None  # the layer whose weight it reads, the number of layers for a later weight
    alone: fx.Node | None


def layer_list(names: Iterable[str]) -> tuple[str, int]:
    """(path, length) of the longest numbered list of modules; ("", 0) where there is none."""
    members: dict[str, set[int]] = {}
    for name in names:
        if found := _NUMBERED.match(name):
            members.setdefault(found[1], set()).add(int(found[2]))
    if not members:
        return "", 0
    path = max(members, key=lambda p: len(members[p]))
    return path, max(members[path]) + 1


def layer_outputs(graph: fx.Graph) -> list[fx.Node]:
    """The hidden state that leaves each decoder layer, first layer first.

    CompileError where a layer's result is not one value, as behind some fusions: a pass that
    needs it should run early.
    """
    layers = find_layers(graph)
    missing = [i for i in range(layers.count) if i not in layers.outputs]
    if missing or not layers.count:
        raise CompileError(
            f"no single value leaves layer {missing[0] if missing else 0}, "
            "so the graph does not show its hidden state"
        )
    return [layers.outputs[i] for i in range(layers.count)]


def copy_out(hidden: fx.Node, buffer: Tensor, name: str) -> None:
    """Copy a hidden state [1, T, N] to `buffer[:T]` at every step, T the tokens of the step."""
    graph = hidden.graph
    tokens = next(n for n in graph.nodes if n.meta.get("input") == StepInput(name="token_ids"))
    target = add_constant(graph, name, buffer, hidden)
    with graph.inserting_before(hidden.next):
        flat = emit(graph, aten.squeeze.dim, hidden, 0)
        size = emit(graph, aten.sym_size.int, tokens, 0)
        rows = emit(graph, aten.slice.Tensor, target, 0, 0, size)
        emit(graph, aten.copy_.default, rows, flat)


def token_embedding(graph: fx.Graph) -> WeightInput | None:
    """The weight of which every token of the step has a row; None where there is no one such."""
    tokens = next(n for n in graph.nodes if input_of(n) == StepInput(name="token_ids"))
    found: set[WeightInput] = set()
    for node in graph.nodes:
        if not is_call(node, aten.embedding.default, quantized_embedding.overload):
            continue
        given = arguments(node)
        ids = given.indices if is_call(node, aten.embedding.default) else given.ids
        role = input_of(given.weight)
        if through(ids, aten.unsqueeze.default) is tokens and isinstance(role, WeightInput):
            found.add(role)
    return found.pop() if len(found) == 1 else None


def find_layers(graph: fx.Graph) -> Layers:
    """Attribute every node to a layer; a placeholder goes with its first reader."""
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
    """Position of the last call of a layer, -1 for none.

    Between a layer's last weight and the next layer's first: where a single value lives on.
    """
    last = max((i for i, c in enumerate(calls) if c.anchor == layer), default=-1)
    if last < 0 and layer >= 0:
        return -1
    later = (i for i, c in enumerate(calls) if i > last and _is_later(c.anchor, layer))
    until = next(later, len(calls))
    cuts = [i for i in range(max(last, 0), until) if calls[i].alone is not None]
    if layer < 0:  # before the layers: the rotary tables may be made after the embedding
        return cuts[-1] if cuts else until - 1
    if not cuts:
        return until - 1
    # The first such value, and what a user's pass made of it; a cast belongs to who reads it.
    return next((i for i in cuts if i + 1 not in cuts or _is_cast(calls[i + 1].node)), cuts[-1])


def _is_cast(node: fx.Node) -> bool:
    return is_call(node, aten.to.dtype, aten._to_copy.default)


def _is_later(anchor: int | None, layer: int) -> bool:
    return anchor is not None and anchor > layer


def _parts(node: fx.Node) -> tuple[str, ...]:
    role = input_of(node)
    return role.parts if isinstance(role, WeightInput) else ()


def _calls(graph: fx.Graph, path: str, count: int) -> Iterator[_Call]:
    """Every call with the layer of its weights and with what lives on behind it.

    Only values made from weights count: positions, masks and rotary tables are everywhere.
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
    """-1 for a weight read before any layer (the embedding), `count` for one read behind them."""
    found: list[int] = []
    for source in node.all_input_nodes:
        for part in _parts(source):
            number = _NUMBERED.match(part)
            inside = number is not None and number[1] == path
            found.append(int(number[2]) if inside and number else (count if seen_layer else -1))
    return max(found, default=None)


def _alone(live: set[fx.Node], newest: fx.Node) -> fx.Node | None:
    """The one live value. Else the newest, if it alone is shaped like the hidden state [1, T, N]:
    keys and values that later layers share live on beside it.
    """
    if len(live) == 1:
        [only] = live
        return only if hasattr(only.meta.get("val"), "shape") else None
    hidden = [n for n in live if _is_hidden(getattr(n.meta.get("val"), "shape", ()))]
    return newest if hidden == [newest] else None


def _is_hidden(shape: Sequence[object]) -> bool:
    return len(shape) == 3 and str(shape[0]) == "1"
