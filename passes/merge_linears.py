"""`merge_linears`: linears that read the same input become one linear over concatenated weights."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from llmc.kernels.quantized_linear import CHANNELS, Quantization
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_ranked, only_user, replace, val
from llmc.passes.inputs import WeightInput, add_input, input_of


@graph_pass()
def merge_linears(gm: fx.GraphModule, *, kept: Sequence[tuple[str, Quantization]] = ()) -> Notes:
    """Run one matrix product where a layer had several (query, key, value; gate, up).

    Those with a bias and those without are merged apart. Weights that are `kept` in their stored
    format are merged only with others of that format, if their channels are whole blocks of it.
    Routers, which are not quantized, are merged only with linears of one channel: gates of shared
    experts.

    Before:
        a = aten.linear(x, wa, ba);  b = aten.linear(x, wb, bb)
    After:
        ab = aten.linear(x, cat(wa, wb), cat(ba, bb))
        a, b = aten.split_with_sizes(ab, [na, nb], -1)
    """
    graph, formats = gm.graph, dict(kept)
    groups: dict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
    for node in calls(graph, aten.linear.default):
        given = arguments(node)
        role = input_of(given.weight)
        parts = role.parts if isinstance(role, WeightInput) else ()
        stored = {formats.get(part) for part in parts}
        format = stored.pop() if len(stored) == 1 else None
        if format is not None and val(given.weight).shape[0] % CHANNELS:
            continue
        groups[given.input, format, given.bias is None].append(node)
    notes = []
    for group in (part for whole in groups.values() for part in _apart(whole)):
        if len(group) < 2:
            continue
        reason = _why_not(group)
        if reason:
            notes.append(f"{', '.join(n.name for n in group)}: {reason}")
        else:
            _merge(graph, group)
    return notes


def _apart(group: list[fx.Node]) -> tuple[list[fx.Node], ...]:
    """The routers with the linears of one channel, and the other linears."""
    if not any(map(is_ranked, group)):
        return (group,)
    routing = [node for node in group if is_ranked(node) or val(node).shape[-1] == 1]
    return routing, [node for node in group if node not in routing]


def _bias(node: fx.Node) -> fx.Node | None:
    bias: fx.Node | None = arguments(node).bias
    return bias


def _why_not(group: list[fx.Node]) -> str | None:
    for node in group:
        for source in (arguments(node).weight, _bias(node)):
            if source is None:
                continue
            role = input_of(source)
            if not isinstance(role, WeightInput):
                return "a weight is computed"
            assert isinstance(source, fx.Node)
            if only_user(source) is None:
                return "a weight is shared with another op"
    roles = [input_of(arguments(n).weight) for n in group]
    if len({role.transposed for role in roles if isinstance(role, WeightInput)}) > 1:
        return "weights are stored in different orders"
    return None


def _cat_input(graph: fx.Graph, sources: list[fx.Node]) -> fx.Node:
    roles = [role for s in sources if isinstance(role := input_of(s), WeightInput)]
    pieces = [piece for role in roles for piece in role.pieces]
    shards = tuple(shard for _, shard in pieces)
    rows = sum(int(val(s).shape[0]) for s in sources)
    fake = val(sources[0]).new_empty(rows, *val(sources[0]).shape[1:])
    role = WeightInput(
        parts=tuple(part for part, _ in pieces),
        transposed=roles[0].transposed,
        shards=shards if any(shards) else (),
    )
    return add_input(graph, f"{sources[0].name}_merged", role, fake)


def _merge(graph: fx.Graph, group: list[fx.Node]) -> None:
    first = group[0]
    weights = [arguments(n).weight for n in group]
    weight = _cat_input(graph, weights)
    biases = [b for n in group if (b := _bias(n)) is not None]
    bias = _cat_input(graph, biases) if biases else None
    sizes = [int(val(w).shape[0]) for w in weights]
    with graph.inserting_before(first):
        merged = emit(graph, aten.linear.default, arguments(first).input, weight, bias)
        split = emit(graph, aten.split_with_sizes.default, merged, sizes, -1)
        parts = []
        for i in range(len(group)):
            part = graph.call_function(operator.getitem, (split, i))
            part.meta["val"] = split.meta["val"][i]
            parts.append(part)
    for node, part in zip(group, parts, strict=True):
        replace(node, part)
