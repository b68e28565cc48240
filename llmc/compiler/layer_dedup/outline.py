"""Capture a deep model from its first layers: repeated layers are captured once.

trace_layers.py finds which layers are the same, capture.py captures the model with only the first
layers, up to one of each kind, and repeat.py appends the others. If the result can't be shown to
equal a capture of all layers, the model is captured in full, and the reason is noted.

All of this is checked: that layers are the same (with torch's guards, on every layer), that they
get the same arguments (every call is compared), that the model does the same before and after the
layers if it has fewer (every op is compared), and that blocks of the graph are complete and equal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from llmc.compiler.build import BuiltModel
from llmc.compiler.capture import capture
from llmc.compiler.interface import KEY_CACHE, VALUE_CACHE
from llmc.compiler.layer_dedup.repeat import repeat_blocks
from llmc.compiler.layer_dedup.trace_layers import LayerCall, LayersDiffer, LayerTracer, ModelTrace
from llmc.compiler.program import CapturedModel
from llmc.errors import CompileError
from llmc.passes.inputs import CacheInput, ConstantInput, Input, WeightInput
from llmc.passes.layers import layer_list
from llmc.weights.parameters import describe_parameters

log = logging.getLogger(__name__)

_FEWEST_LAYERS = 6  # capturing fewer is as fast as tracing them


def capture_outlined(built: BuiltModel, device: torch.device) -> CapturedModel:
    """The same graph as from `capture`; its note says how many layers were captured.

    Raises CompileError if `capture` does.
    """
    path, count = layer_list(name for name, _ in built.module.named_parameters())
    if count < _FEWEST_LAYERS:
        return capture(built, device)
    try:
        captured, first = _outline(built, device, path, count)
    except LayersDiffer as e:
        log.info("capturing all %d layers: %s", count, e)
        return replace(capture(built, device), note=f"all captured: {e}")
    return replace(captured, note=f"{first} captured")


def _outline(
    built: BuiltModel, device: torch.device, path: str, count: int
) -> tuple[CapturedModel, int]:
    layers = built.module.get_submodule(path)
    if not isinstance(layers, nn.ModuleList) or len(layers) != count:
        raise LayersDiffer(f"{path} is not a plain list of layers")
    tracer = LayerTracer(built.module, list(layers), most_traces=count // 2, head=built.head)
    with tracer.ready():
        whole = tracer.run()
        calls = _in_order(whole, count)
        first = _enough(calls)
        if first > count // 2:
            raise LayersDiffer(f"the first {first} are needed to cover every kind")
        with _only(layers, first):
            _compare(whole, tracer.run())
    with _only(layers, first):
        try:
            captured = capture(built, device)
        except CompileError as e:
            raise LayersDiffer(f"the first {first} can't be captured separately: {e}") from e
    graph = captured.graph.graph
    names = _Names(built, calls)
    models = [_model(calls, layer, first) for layer in range(first, count)]
    repeat_blocks(graph, path, [c.trace for c in calls[:first]], models, names.rename)
    graph.lint()
    captured.graph.recompile()
    return replace(captured, parameters=describe_parameters(built.module, built.buffers)), first


@contextmanager
def _only(layers: nn.ModuleList, first: int) -> Iterator[None]:
    """Inside this context, the model only has its first layers; its config is unchanged."""
    rest = list(layers)[first:]
    del layers[first:]
    try:
        yield
    finally:
        layers.extend(rest)


def _in_order(whole: ModelTrace, count: int) -> list[LayerCall]:
    """The calls, if every layer is called once, in order, with nothing in between."""
    if [call.layer for call in whole.calls] != list(range(count)):
        raise LayersDiffer("they are not called once each, in order")
    for layer, ops in enumerate(whole.ops[1:-1]):
        if ops:
            raise LayersDiffer(
                f"between layers {layer} and {layer + 1} the model calls {ops[0][:80]}"
            )
    return whole.calls


def _compare(whole: ModelTrace, part: ModelTrace) -> None:
    """Raise LayersDiffer unless the model with fewer layers does the same around and in them."""
    if [(c.layer, c.trace, c.given) for c in part.calls] != [
        (c.layer, c.trace, c.given) for c in whole.calls[: len(part.calls)]
    ]:
        raise LayersDiffer("with fewer layers, their arguments differ")
    if (part.ops[0], part.ops[-1]) != (whole.ops[0], whole.ops[-1]):
        raise LayersDiffer("with fewer layers, the model does something different around them")
    if any(part.ops[1:-1]):
        raise LayersDiffer("with fewer layers, the model does something between them")


def _kind(call: LayerCall) -> tuple[int, str]:
    return call.trace, call.given


def _enough(calls: Sequence[LayerCall]) -> int:
    """The smallest number of first layers that include every later layer's kind.

    The last of them shares its trace with another, so that the end of its block can be checked.
    The very first layer can't represent others, because its input is not a layer's output.
    """
    first = 2
    kinds = [_kind(call) for call in calls]
    while first < len(calls):
        covered = set(kinds[first:]) <= set(kinds[1:first])
        if covered and calls[first - 1].trace in [c.trace for c in calls[: first - 1]]:
            break
        first += 1
    return first


def _model(calls: Sequence[LayerCall], layer: int, first: int) -> int:
    return next(i for i in range(1, first) if _kind(calls[i]) == _kind(calls[layer]))


class _Names:
    """Translates the inputs of one layer to those of another layer with the same trace.

    Both read their tensors in the same order, so inputs correspond by index.
    """

    def __init__(self, built: BuiltModel, calls: Sequence[LayerCall]) -> None:
        self._built = built
        self._calls = calls
        self._parameters: dict[int, str] = {}  # by first name, like capture
        for name, parameter in built.module.named_parameters(remove_duplicate=False):
            self._parameters.setdefault(id(parameter), name)
        persistent = set(built.module.state_dict())
        self._buffers: dict[int, str] = {}
        for name, buffer in built.module.named_buffers(remove_duplicate=False):
            if name in built.buffers:
                self._buffers[id(buffer)] = name
            elif name in persistent:
                self._parameters.setdefault(id(buffer), name)
        self._by_name = {name: i for i, name in self._parameters.items()}
        self._by_value = {id(built.buffers[name]): i for i, name in self._buffers.items()}
        self._caches = self._number_caches()

    def _number_caches(self) -> list[dict[int, tuple[int, str]]]:
        """For each layer: a cache's tensor -> (number, part), numbered like capture does."""
        owners: dict[int, tuple[int, str]] = {}
        for child in self._built.module.modules():
            owners[id(getattr(child, KEY_CACHE))] = (id(child), "key")
            owners[id(getattr(child, VALUE_CACHE))] = (id(child), "value")
        numbers: dict[int, int] = {}
        found = []
        for call in self._calls:
            mine: dict[int, tuple[int, str]] = {}
            for tensor in call.read:
                if id(tensor) in owners:
                    owner, part = owners[id(tensor)]
                    mine[id(tensor)] = (numbers.setdefault(owner, len(numbers)), part)
            found.append(mine)
        return found

    def rename(self, role: Input, layer: int, to: int) -> Input:
        """The role in layer `to`. LayersDiffer if the block reads a tensor its trace does not."""
        try:
            return self._renamed(role, layer, to)
        except KeyError as e:
            raise LayersDiffer(
                f"layer {layer} reads a tensor that its trace does not: {role}"
            ) from e

    def _renamed(self, role: Input, layer: int, to: int) -> Input:
        if isinstance(role, WeightInput):
            (name,) = role.parts
            other = self._other(self._by_name[name], layer, to)
            return replace(role, parts=(self._parameters[other],))
        if isinstance(role, ConstantInput):
            other = self._other(self._by_value[id(role.tensor)], layer, to)
            return ConstantInput(tensor=self._built.buffers[self._buffers[other]])
        if isinstance(role, CacheInput):
            numbers = {cache: tensor for tensor, cache in self._caches[layer].items()}
            other = self._other(numbers[role.layer, role.part], layer, to)
            return replace(role, layer=self._caches[to][other][0])
        return role

    def _other(self, tensor: int, layer: int, to: int) -> int:
        read, other = self._calls[layer].read, self._calls[to].read
        places = {id(mine): id(its) for mine, its in zip(read, other, strict=True)}
        return places[tensor]
