"""A graph of a model's first layers -> the graph of all its layers, by copying blocks of nodes.

A block is one layer's part of the graph. Copying it is correct if it only reads the hidden state of
the previous layer, its own inputs, and what is computed before the first layer; if its result is
one value; and if blocks of the same trace are equal node by node. All of that is checked here;
LayersDiffer says which condition fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from llmc.compiler.layer_dedup.trace_layers import LayersDiffer
from llmc.passes.inputs import Input, input_of
from llmc.passes.layers import Layers, find_layers

Rename = Callable[[Input, int, int], Input]  # (an input's role, its layer, the target layer)


def repeat_blocks(
    graph: fx.Graph, path: str, traces: Sequence[int], models: Sequence[int], rename: Rename
) -> None:
    """Append a copy of block `models[i]` for every further layer, in place.

    `traces` are those of the layers in the graph. `rename` returns the role of the input in another
    layer that corresponds to an input of one layer.
    """
    layers = find_layers(graph)
    if (layers.path, layers.count) != (path, len(traces)):
        raise LayersDiffer("the graph's nodes can't be assigned to layers")
    _hoist_sizes(graph, layers.of)
    blocks = _Blocks(graph, layers)
    twins = [(traces.index(trace), i) for i, trace in enumerate(traces)]
    blocks.complete_first(next((i for twin, i in twins if twin == 0 and i), 0))
    for i in range(layers.count):
        blocks.check(i)
    for twin, i in twins:
        if twin != i:
            blocks.compare(twin, i, rename)
    blocks.append(models, rename)


def _hoist_sizes(graph: fx.Graph, of: dict[fx.Node, int]) -> None:
    """Move sizes that a layer computes from the number of tokens, and others read, to the front."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for size in [n for n in order if _is_size(n) and any(of[u] != of[n] for u in n.users)]:
        needed: list[fx.Node] = []
        stack = [size]
        while stack:
            node = stack.pop()
            if of[node] != -1 and node not in needed:
                needed.append(node)
                stack += node.all_input_nodes
        if not all(map(_is_size, needed)):
            continue
        for node in sorted(needed, key=order.__getitem__):
            max(node.all_input_nodes, key=order.__getitem__).append(node)
            of[node] = -1


def _is_size(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.SymInt)


class _Blocks:
    """The nodes of a graph by layer."""

    def __init__(self, graph: fx.Graph, layers: Layers) -> None:
        self.graph = graph
        self.of = layers.of
        self.count = layers.count
        self.calls: list[list[fx.Node]] = [[] for _ in range(layers.count)]
        for node in graph.nodes:
            layer = layers.of[node]
            if node.op != "placeholder" and 0 <= layer < layers.count:
                self.calls[layer].append(node)
        missing = [i for i in range(layers.count) if i not in layers.outputs]
        if missing:
            raise LayersDiffer(f"no single value leaves layer {missing[0]}")
        self.outputs = [layers.outputs[i] for i in range(layers.count)]

    def complete_first(self, twin: int) -> None:
        """Extend the first layer's block to the length of another block with the same trace.

        Its nodes before its first weight look as if they came before all layers.
        """
        missing = len(self.calls[twin]) - len(self.calls[0])
        before = [n for n in self.graph.nodes if n.op != "placeholder" and self.of[n] == -1]
        if 0 < missing <= len(before):
            self.calls[0] = before[-missing:] + self.calls[0]
            self.of.update((node, 0) for node in before[-missing:])

    def check(self, layer: int) -> None:
        """Raise LayersDiffer if the block reads, or is read by, what a copy could not be."""
        before = self.outputs[layer - 1] if layer else None
        for node in self.calls[layer]:
            if node.op != "call_function":
                raise LayersDiffer(f"layer {layer} contains a {node.op}")
            for source in node.all_input_nodes:
                ours = source.op == "placeholder" or self.of[source] in (-1, layer)
                if not ours and source is not before:
                    raise LayersDiffer(
                        f"layer {layer} reads {source.name} of layer {self.of[source]}"
                    )
            for user in node.users:
                leaves = self.of[user] != layer
                if leaves and (node is not self.outputs[layer] or self.of[user] != layer + 1):
                    raise LayersDiffer(f"{node.name} of layer {layer} is read elsewhere")

    def compare(self, first: int, second: int, rename: Rename) -> None:
        """Raise LayersDiffer unless two blocks of one trace are equal, except for their inputs."""
        if len(self.calls[first]) != len(self.calls[second]):
            raise LayersDiffer(f"layers {first} and {second} have one trace but different graphs")
        same = dict(zip(self.calls[first], self.calls[second], strict=True))
        for a, b in same.items():
            equal = (
                a.target == b.target
                and _shape_of(a.meta.get("val")) == _shape_of(b.meta.get("val"))
                and self._same_args(a, b, same, first, second, rename)
            )
            if not equal:
                raise LayersDiffer(f"{a.name} of layer {first} is {b.name} in layer {second}")
        if same[self.outputs[first]] is not self.outputs[second]:
            raise LayersDiffer(f"layers {first} and {second} return different values")

    def _same_args(
        self,
        a: fx.Node,
        b: fx.Node,
        same: Mapping[fx.Node, fx.Node],
        first: int,
        second: int,
        rename: Rename,
    ) -> bool:
        """Whether the constants are equal and the inputs correspond."""
        if len(a.all_input_nodes) != len(b.all_input_nodes) or _plain(a) != _plain(b):
            return False
        for x, y in zip(_sources(a), _sources(b), strict=True):
            role, other = input_of(x), input_of(y)
            if x in same:
                if same[x] is not y:
                    return False
            elif role is not None and other is not None:
                if not _same_role(rename(role, first, second), other):
                    return False
            elif x is not y and not self._are_hidden(x, y, first, second):
                return False
        return True

    def _are_hidden(self, x: fx.Node, y: fx.Node, first: int, second: int) -> bool:
        """Whether these are the inputs of the two layers. The first layer's input is any value that
        is computed before all layers."""
        return y is self.outputs[second - 1] and (
            self.of[x] == -1 if first == 0 else x is self.outputs[first - 1]
        )

    def append(self, models: Sequence[int], rename: Rename) -> None:
        known = {_key(n.meta["input"]): n for n in self.graph.nodes if n.op == "placeholder"}
        inputs = [self._inputs(layer) for layer in range(self.count)]
        at_input = [n for n in known.values() if self.of[n] < self.count][-1]
        at_call = self.calls[-1][-1]
        hidden = self.outputs[-1]
        for layer, model in enumerate(models, start=self.count):
            env: dict[fx.Node, fx.Node] = {self.outputs[model - 1]: hidden}
            for node in inputs[model]:
                role = rename(node.meta["input"], model, layer)
                if _key(role) not in known:
                    at_input = known[_key(role)] = self._copy_input(node, role, at_input)
                env[node] = known[_key(role)]
            for node in self.calls[model]:
                with self.graph.inserting_after(at_call):
                    at_call = self.graph.node_copy(node, functools.partial(_mapped, env))
                env[node] = at_call
            hidden = env[self.outputs[model]]
        self.outputs[-1].replace_all_uses_with(
            hidden, delete_user_cb=lambda user: self.of.get(user) == self.count
        )

    def _inputs(self, layer: int) -> list[fx.Node]:
        """The placeholders that a block reads, in graph order."""
        read = {source for node in self.calls[layer] for source in node.all_input_nodes}
        return [n for n in self.graph.nodes if n.op == "placeholder" and n in read]

    def _copy_input(self, source: fx.Node, role: Input, after: fx.Node) -> fx.Node:
        with self.graph.inserting_after(after):
            node = self.graph.node_copy(source)
        node.target = node.name
        node.meta["input"] = role
        return node


def _mapped(env: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return env.get(node, node)


def _sources(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _plain(node: fx.Node) -> str:
    """The arguments without the nodes in them."""
    return repr(fx.node.map_arg((node.args, node.kwargs), lambda n: None))


def _shape_of(val: Any) -> Any:
    if isinstance(val, list | tuple):
        return [_shape_of(v) for v in val]
    if isinstance(val, Tensor):
        return ([str(s) for s in val.shape], [str(s) for s in val.stride()], val.dtype, val.device)
    return str(val)


def _key(role: Input) -> Any:
    """A key to compare roles by: constants by their tensor, all others by value."""
    tensor = getattr(role, "tensor", None)
    return role if tensor is None else id(tensor)


def _same_role(a: Input, b: Input) -> bool:
    return bool(_key(a) == _key(b))
