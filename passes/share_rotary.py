"""`share_rotary`: values that depend only on a token's position are read from a precomputed table.

These are the cosines and sines of rotary embeddings, learned-position scalings and the like:
anything that a model computes only from positions and its own constants.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, emit, is_call, val
from llmc.passes.inputs import ConstantInput, StepInput, add_input, input_of

_MAX_BYTES = 512 << 20  # per table: 2**20 positions of 128 float32 values
# Ops that treat every position on its own; anything else could mix tokens.
_PER_TOKEN = {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.transpose.int,
    aten.to.dtype,
    aten.to.device,
    aten._to_copy.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.cos.default,
    aten.sin.default,
    aten.cat.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.view.default,
    aten.reshape.default,
    aten.matmul.default,
    aten.repeat_interleave.self_int,
    aten.stack.default,
    aten.embedding.default,
    aten.index.Tensor,
    aten.split.Tensor,
    aten.flatten.using_ints,
    operator.getitem,
}
# Of constants alone, also these: frequencies that a model computes in every step.
_OF_CONSTANTS = {
    *_PER_TOKEN,
    aten.arange.default,
    aten.arange.start_step,
    aten.pow.Scalar,
    aten.reciprocal.default,
}


@graph_pass()
def share_rotary(gm: fx.GraphModule, *, max_positions: int) -> Notes:
    """Replace values that depend only on positions with rows of a table.

    Before:
        cos [1, T, D] = aten.cos(aten.mul(positions, inv_freq)) ...
    After:
        cos [1, T, D] = aten.unsqueeze(aten.index_select(cos_table [max_positions, D], 0,
                                                         positions), 0)
    """
    graph = gm.graph
    positions = next((n for n in graph.nodes if input_of(n) == StepInput(name="positions")), None)
    if positions is None:
        return ["the model reads no positions"]
    inside = _closure(graph, positions)
    bases = {_base(n, inside) for n in inside if any(user not in inside for user in n.users)}
    notes = []
    texts: dict[fx.Node, str] = {}
    rows: dict[str, fx.Node] = {}  # by what is computed: layers may repeat a computation
    for node in [n for n in graph.nodes if n in bases]:
        axis = _token_axis(node, positions)
        if axis is None:
            notes.append(f"{node.name}: not one row of floats per token")
            continue
        text = _text(node, inside, texts)
        if text not in rows:
            num_bytes = _row_bytes(graph, node, inside) * max_positions
            if num_bytes > _MAX_BYTES:
                notes.append(
                    f"{node.name}: a table of {max_positions} positions would take "
                    f"{num_bytes >> 20} MiB; set a smaller max_model_len to allow it"
                )
                continue
            table = _tabulate(graph, node, inside, max_positions)
            if table is None:
                notes.append(f"{node.name}: its rows are not functions of a single position")
                continue
            rows[text] = _read_rows(graph, node, table, positions)
        _use_rows(graph, node, rows[text], axis)
    return notes


def _text(node: fx.Node, inside: set[fx.Node], texts: dict[fx.Node, str]) -> str:
    """The whole expression of a node; equal texts are equal values."""
    if node not in inside and not _from_constants(node):
        return node.name
    if node not in texts:
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: _text(n, inside, texts))
        texts[node] = f"{node.target}{args}"
    return texts[node]


def _closure(graph: fx.Graph, positions: fx.Node) -> set[fx.Node]:
    """Calls that read only positions (through per-token ops) and constants."""
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _PER_TOKEN:
            continue
        sources = node.all_input_nodes
        touches = any(s is positions or s in inside for s in sources)
        if touches and all(_known(s, positions, inside) for s in sources):
            inside.add(node)
    return inside


def _base(node: fx.Node, inside: set[fx.Node]) -> fx.Node:
    """The value before views that only add a dimension, which every layer repeats."""
    while is_call(node, aten.unsqueeze.default) and arguments(node).self in inside:
        source: fx.Node = arguments(node).self
        if not val(source).is_floating_point() or val(source).dim() < 3:
            break
        node = source
    return node


def _known(node: fx.Node, positions: fx.Node, inside: set[fx.Node]) -> bool:
    return (
        node is positions
        or node in inside
        or isinstance(input_of(node), ConstantInput)
        or _from_constants(node)
        or (node.op == "call_function" and node.target is aten.sym_size.int)
    )


def _from_constants(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in _OF_CONSTANTS:
        return False
    return all(
        isinstance(input_of(s), ConstantInput) or _from_constants(s) for s in node.all_input_nodes
    )


def _token_axis(node: fx.Node, positions: fx.Node) -> int | None:
    """The dimension of the tokens in a value with one row of floats for each, or None."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 3:
        return None
    tokens = str(val(positions).shape[0])
    others = [str(size) for size in value.shape[:-1]]
    expected = ["1"] * (len(others) - 1) + [tokens]
    return others.index(tokens) if sorted(others) == sorted(expected) else None


def _evaluate(graph: fx.Graph, target: fx.Node, inside: set[fx.Node], positions: Tensor) -> Tensor:
    """The value of `target` for real positions, on the device of the constants."""
    env: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node in env:
            return env[node]
        role = input_of(node)
        if role == StepInput(name="positions"):
            result: Any = positions
        elif isinstance(role, ConstantInput):
            result = role.tensor.to(positions.device)
        elif node.target is aten.sym_size.int:
            result = positions.shape[0]
        else:
            args = fx.node.map_arg(node.args, value)
            kwargs = fx.node.map_arg(node.kwargs, value)
            args, kwargs = fx.node.map_aggregate(
                (args, kwargs), lambda a: positions.device if isinstance(a, torch.device) else a
            )
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        env[node] = result
        return result

    with torch.no_grad():
        out = value(target)
    assert isinstance(out, Tensor)
    return out


def _row_bytes(graph: fx.Graph, node: fx.Node, inside: set[fx.Node]) -> int:
    row = _evaluate(graph, node, inside, torch.arange(1))
    return row.numel() * row.dtype.itemsize


def _tabulate(
    graph: fx.Graph, node: fx.Node, inside: set[fx.Node], max_positions: int
) -> Tensor | None:
    """Rows for positions 0 to max_positions - 1, or None if a row depends on its neighbors."""
    table = _evaluate(graph, node, inside, torch.arange(max_positions)).flatten(0, -2)
    probe = torch.randperm(max_positions, generator=torch.Generator().manual_seed(0))[:7]
    again = _evaluate(graph, node, inside, probe).flatten(0, -2)
    return table.contiguous() if torch.equal(table[probe], again) else None


def _read_rows(graph: fx.Graph, node: fx.Node, table: Tensor, positions: fx.Node) -> fx.Node:
    fake = val(node).new_empty(table.shape)
    source = add_input(graph, f"{node.name}_table", ConstantInput(tensor=table), fake)
    with graph.inserting_before(node):
        return emit(graph, aten.index_select.default, source, 0, positions)


def _use_rows(graph: fx.Graph, node: fx.Node, rows: fx.Node, axis: int) -> None:
    """Replace a value by its rows [T, D]; `axis`: the dimension of the tokens in it."""
    with graph.inserting_before(node):
        for _ in range(axis):
            rows = emit(graph, aten.unsqueeze.default, rows, 0)
        for _ in range(val(node).dim() - val(rows).dim()):
            rows = emit(graph, aten.unsqueeze.default, rows, -2)
    node.replace_all_uses_with(rows)
