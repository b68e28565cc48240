"""`apply_lora`: LoRA adapters of the requests of a step, each row's own, on every linear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import fx

from llmc.kernels.add_lora import add_lora
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, val
from llmc.passes.inputs import (
    AdapterInput,
    StepInput,
    WeightInput,
    add_constant,
    add_input,
    input_of,
    step_input,
    token_input,
)


@graph_pass()
def apply_lora(gm: fx.GraphModule, *, slots: int = 0, rank: int = 0) -> Notes:
    """Add the adapters' part to the output of every linear over parameters, in place.

    `slots` adapters are there at a time, of ranks up to `rank`; what is in the slots changes while
    the engine runs. Of a merged linear, each part has its own A, and its own columns of the output.

    Before:
        y = aten.linear(x, w)
    After:
        y = aten.linear(x, w)
        llmc.add_lora(y, x, a [slots, parts, rank, K], b [slots, rank, N], bounds [parts + 1],
                      adapter [tokens], or [samples] at the output head)
    """
    if not slots:
        return ["no --enable-lora was asked for"]
    graph = gm.graph
    rows = _Rows(graph)
    bounds: dict[tuple[int, ...], fx.Node] = {}
    left: Counter[str] = Counter()
    for node in calls(graph, aten.linear.default):
        if any(is_call(user, add_lora.overload) for user in node.users):
            continue
        given = arguments(node)
        role = input_of(given.weight)
        adapter = rows.of(given.input)
        if not isinstance(role, WeightInput) or adapter is None:
            left["the weight is computed" if adapter else "their rows are not the tokens"] += 1
            continue
        widths = _widths(node, role)
        if widths not in bounds:
            edges = [sum(widths[:i]) for i in range(len(widths) + 1)]
            table = torch.tensor(edges, dtype=torch.int32, device=val(node).device)
            bounds[widths] = add_constant(graph, "lora_bounds", table, node)
        channels, depth = (int(n) for n in val(given.weight).shape)
        shapes = {"a": (slots, len(widths), rank, depth), "b": (slots, rank, channels)}
        a, b = (
            add_input(
                graph,
                f"{given.weight.name}_lora_{matrix}",
                AdapterInput(matrix=matrix, weights=role.parts, widths=widths),
                val(node).new_empty(shapes[matrix]),
            )
            for matrix in ("a", "b")
        )
        with graph.inserting_after(node):
            emit(graph, add_lora.overload, node, given.input, a, b, bounds[widths], adapter)
    return [f"{count} linears: {reason}" for reason, count in left.items()]


def _widths(linear: fx.Node, role: WeightInput) -> tuple[int, ...]:
    """Output channels of each parameter: those of a merged linear are split behind it."""
    if len(role.parts) == 1:
        return (int(val(linear).shape[-1]),)
    (split,) = (user for user in linear.users if is_call(user, aten.split_with_sizes.default))
    return tuple(int(n) for n in arguments(split).split_sizes)


class _Rows:
    """The adapter of each row of a linear's input, worked out once a step."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._num_tokens = str(val(token_input(graph)).shape[0])
        self._made: dict[str, fx.Node] = {}

    def of(self, source: fx.Node) -> fx.Node | None:
        """int32, one for each row of `source`; None where these are not tokens or samples."""
        lead = [str(n) for n in val(source).shape[:-1]]
        if is_call(source, aten.index_select.default) and input_of(
            arguments(source).index
        ) == StepInput(name="logits_index"):
            return self._once("row", self._by_sample)
        if [n for n in lead if n != "1"] == [self._num_tokens]:
            return self._once("token", self._by_token)
        return None

    def _once(self, name: str, make: Callable[[fx.Node], fx.Node]) -> fx.Node:
        if name not in self._made:
            table = step_input(self._graph, "adapter")
            self._made[name] = make(table)
        return self._made[name]

    def _by_sample(self, table: fx.Node) -> fx.Node:
        row = step_input(self._graph, "row")
        with self._graph.inserting_before(self._first_call()):
            return emit(self._graph, aten.index_select.default, table, 0, row)

    def _by_token(self, table: fx.Node) -> fx.Node:
        graph = self._graph
        start = step_input(graph, "query_start")
        request_row = step_input(graph, "request_row")
        with graph.inserting_before(self._first_call()):
            by_request = emit(graph, aten.index_select.default, table, 0, request_row)
            # token t is the request's whose end is the first above t
            count = emit(
                graph,
                aten.cumsum.default,
                emit(graph, aten.ones_like.default, token_input(graph)),
                0,
            )
            ends = emit(graph, aten.slice.Tensor, start, 0, 1)
            ends = emit(graph, aten.to.dtype, ends, torch.int64)
            request = emit(graph, aten.searchsorted.Tensor, ends, count)
            return emit(graph, aten.index_select.default, by_request, 0, request)

    def _first_call(self) -> fx.Node:
        found: fx.Node = next(n for n in self._graph.nodes if n.op != "placeholder")
        return found
