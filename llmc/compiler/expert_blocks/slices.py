"""Experts that are slices of parameters: what was recorded of the slices -> an expert's code.

The parameters have no values while a block is recorded. In their place are weights of a low rank,
whose numbers follow from the parameter's name and the expert's number.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from llmc.compiler.expert_blocks.expert_code import ExpertCode, by_row
from llmc.compiler.expert_blocks.generalize import ModelDtype, Pair, Size, emit_function
from llmc.compiler.expert_blocks.record import Call, NotUnderstood, Recording, Value, inner_values
from llmc.compiler.expert_blocks.routing import Experts
from llmc.kernels.expert_linear import expert_linear

_RANK = 4


class SliceProducts:
    """Products with weights of a low rank in place of slices of parameters, by name."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._factors: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, name: str, number: Tensor | int, channels: int) -> Tensor:
        """x [.., K], or [S, K] and number [S] -> [.., channels]"""
        depth = x.shape[-1]
        key = name, depth, channels
        if key not in self._factors:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            one = torch.randn(self._count, depth, _RANK, generator=generator) * depth**-0.5
            other = torch.randn(self._count, _RANK, channels, generator=generator)
            self._factors[key] = one, other
        one, other = (factor[number].to(x.dtype) for factor in self._factors[key])
        if isinstance(number, int):
            return x @ one @ other
        return torch.bmm(torch.bmm(x.unsqueeze(1), one), other).squeeze(1)


def slice_code(block: nn.Module, first: Recording, second: Recording) -> ExpertCode:
    """The code that the experts have in common. Raises NotUnderstood."""
    numbers = sorted(first.products.keys() & second.products.keys())
    if not numbers:
        raise NotUnderstood("too few of its experts are chosen to compare them")
    graphs = [_graph(first, second, number) for number in numbers]
    if len({str(graph) for graph in graphs}) > 1:
        raise NotUnderstood("its experts differ in their code")
    parameters = {name: p[0] for name, p in block.named_parameters() if p.dim() > 1}
    return by_row(block, graphs[0], 0, parameters, joins=False)


def experts_of(code: ExpertCode, block: nn.Module, products: SliceProducts) -> Experts:
    """What runs in place of the experts of a block without their weights."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(code.code.graph, {}))
    for node in graph.nodes:
        if node.target is expert_linear.overload:
            node.target = _product(products)
    run = fx.GraphModule(code.code, graph)
    names = [stack.parts[0] for stack in code.stacks]
    parameters = [(name, block.get_parameter(name)) for name in names]
    # a parameter without values is passed by its name
    given = [_Named(name, p) if p.is_meta else p for name, p in parameters]

    def experts(rows: Tensor, number: Tensor) -> Tensor:
        out: Tensor = run(rows, number, *given)
        return out

    return experts


class _Named:
    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name, self.shape, self.dtype = name, parameter.shape, parameter.dtype


def _product(products: SliceProducts) -> Callable[..., Tensor]:
    def product(
        x: Tensor, weight: _Named, bias: Tensor | None, number: Tensor, transposed: bool
    ) -> Tensor:
        made = products(x, weight.name, number, weight.shape[2 if transposed else 1])
        return made if bias is None else made + bias[number]

    return product


def _ends(recording: Recording, number: int) -> tuple[Value, Value]:
    """The rows of an expert, and its result: behind its last product, and what it then adds."""
    own = recording.products[number]
    result = Value(own[-1])
    all_products = (index for indices in recording.products.values() for index in indices)
    end = min((i for i in all_products if i > own[-1]), default=len(recording.calls))
    for index in range(own[-1] + 1, end):
        values = inner_values(recording.calls[index])
        slices = [recording.slice_of(recording.calls[value.call]) for value in values]
        if result in values and any(found is not None and found[1] == number for found in slices):
            result = Value(index)
    rows = {recording.rows_of[index] for index in own if index in recording.rows_of}
    if len(rows) != 1:
        raise NotUnderstood("its experts get the states of tokens more than once")
    return rows.pop(), result


class _SlicePair(Pair):
    """Stops at slices of parameters: the number of an expert may be computed in any way."""

    def __init__(self, first: Recording, second: Recording, number: int) -> None:
        super().__init__(first, second)
        self._number = number

    def unify(self, one: Value, other: Value) -> None:
        call, other_call = self.first.calls[one.call], self.second.calls[other.call]
        found = self.first.slice_of(call)
        if found is None or one.changes or found != self.second.slice_of(other_call):
            super().unify(one, other)
        elif found[1] != self._number:
            raise NotUnderstood("an expert uses a slice of another")
        else:
            self.done[one] = other
            self.calls[one.call] = Call(kind="slice", target=found[0])


def _graph(first: Recording, second: Recording, number: int) -> fx.Graph:
    """The calls of an expert from the rows to the result, with slices as parameters."""
    pair = _SlicePair(first, second, number)
    rows, result = _ends(first, number)
    other_rows, other_result = _ends(second, number)
    pair.done[rows] = other_rows
    pair.unify(result, other_result)
    graph = fx.Graph()
    made: dict[int, Any] = {}
    hidden = graph.placeholder("rows")

    def argument(given: Any) -> Any:
        if isinstance(given, Value):
            if given == rows:
                return hidden
            node = made[given.changes[-1] if given.changes else given.call]
            for step in () if given.changes else given.path:
                node = graph.call_function(operator.getitem, (node, step))
            return node
        if isinstance(given, Size):
            raise NotUnderstood("its experts' code depends on the number of tokens")
        if isinstance(given, ModelDtype):
            return graph.call_function(getattr, (hidden, "dtype"))
        if isinstance(given, tuple | list):
            return type(given)(map(argument, given))
        if isinstance(given, dict):
            return {key: argument(value) for key, value in given.items()}
        return given

    for index in sorted(pair.calls):
        call = pair.calls[index]
        if call.kind == "slice":
            made[index] = graph.create_node("get_attr", call.target)
        elif call.kind == "module":
            made[index] = graph.call_module(call.target, argument(call.args), argument(call.kwargs))
        elif call.kind == "function":
            given = argument(call.args), argument(call.kwargs)
            made[index] = emit_function(graph, call.target, *given)
        else:
            raise NotUnderstood("its experts compute with more than the states of tokens")
    graph.output(argument(result))
    return graph
