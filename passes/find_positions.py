"""`find_positions`: code that numbers the tokens of a step uses each request's positions instead.

Some models number their tokens themselves (an `arange` over the sequence) in addition to the
positions that they are given. They were captured as one sequence that begins at 0. In a packed
step, the same code would continue counting from one request to the next, and restart at 0 in every
chunk of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.passes.base import Notes, graph_pass, writes
from llmc.passes.edit import CASTS, aten, calls, emit, is_call, replace, through, update_val, val
from llmc.passes.evaluate import NotEvaluable, evaluate
from llmc.passes.find_attention import spells_attention
from llmc.passes.inputs import ConstantInput, StepInput, input_of, step_input

_LENGTHS = (19, 37)  # lengths of the sequences that values are computed for
_COUNTING = (aten.arange.default, aten.arange.start, aten.arange.start_step)
# These read only the shape and dtype of their first argument.
_OF_A_SHAPE = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
_SQUEEZES = (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
_VIEWS = (
    aten.unsqueeze.default,
    *_SQUEEZES,
    aten.view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.transpose.int,
)
_CUTS = (aten.slice.Tensor, aten.select.int, aten.narrow.default)
# Ops, besides pointwise ones, that compute a token's row from that token's row alone.
_ROW_BY_ROW = (aten.linear.default, aten.cat.default, aten.stack.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.mm.default)
_LOOK_UPS = (aten.embedding.default, aten.index_select.default, aten.index.Tensor)


@dataclass(slots=True)
class _Counted:
    """The values that depend only on the number of tokens and on constants."""

    same: set[fx.Node] = field(default_factory=set)  # all elements equal, whatever the number
    counts: dict[fx.Node, int] = field(default_factory=dict)  # a + 0, a + 1, ... -> a
    derived: set[fx.Node] = field(default_factory=set)  # computed from counts
    others: set[fx.Node] = field(default_factory=set)

    def __contains__(self, node: fx.Node) -> bool:
        return any(node in kind for kind in (self.same, self.counts, self.derived, self.others))


@graph_pass(required=True)
def find_positions(gm: fx.GraphModule, *, max_positions: int) -> Notes:
    """Replace numbers that a model assigns to its tokens with the positions that it is given.

    Any value computed from them must be a row for each token that depends only on its position:
    it is run, and compared with its original value. Raises CompileError if that fails, or if
    anything else depends on a token's index in the step or on the number of tokens.

    Before:
        i [T] = aten.arange(T)
        y [1, T, D] = aten.mul(x, aten.view(aten.log1p(i), [1, T, 1]))
        rows [T, D] = aten.slice(table [P, D], 0, 0, T)
    After:
        y [1, T, D] = aten.mul(x, aten.view(aten.log1p(positions), [1, T, 1]))
        rows [T, D] = aten.index_select(table [P, D], 0, positions)
    """
    graph = gm.graph
    if spells_attention(gm):
        return ["each step has the tokens of one sequence only (see find_attention)"]
    notes = []
    for node in calls(graph, aten.slice.Tensor):
        if _is_first_rows(node):
            notes.append(f"{node.name} is read by the position of a token")
            _read_by_position(graph, node)
    for node in graph.nodes:
        _refuse_numbers(node)
    found = _find(graph)
    notes += [_left_alone(node) for node in found.others if _is_read(node, found)]
    ends = [n for n in graph.nodes if n in found.derived and _is_read(n, found)]
    for node in (*found.counts, *ends):
        for reader in node.users:
            if reader not in found:
                _check_reader(node, reader)
    before = {end: [_run(graph, end, torch.arange(n)) for n in _LENGTHS] for end in ends}
    for node, first in found.counts.items():
        notes.append(f"{node.name} is the position of a token")
        replace(node, _positions(graph, node, first))
    for end, values in before.items():
        _prove(graph, end, values, max_positions)
    return notes


def _is_first_rows(node: fx.Node) -> bool:
    """Whether it is table[:T], of a table with the same number of rows for every T."""
    source, dim, start, _, step = _cut(node)
    if _is_written(node):
        return False
    is_fixed = not isinstance(val(source).shape[dim], torch.SymInt)
    is_cut = str(val(node).shape[dim]) == str(val(_tokens(node.graph)).shape[0])
    return is_fixed and is_cut and start in (None, 0) and step == 1


def _cut(node: fx.Node) -> tuple[Any, int, Any, Any, Any]:
    """The arguments of a slice, with defaults for those that are omitted."""
    args: list[Any] = [*node.args, None, None, None, None][:5]
    source, dim, start, end, step = args
    return source, (dim or 0) % val(node).dim(), start, end, step or 1


def _read_by_position(graph: fx.Graph, node: fx.Node) -> None:
    """Read the tokens' rows from the whole table by their positions."""
    table, dim, *_ = _cut(node)
    path, ends = _through_views(node)
    if all(_looks_up(value, reader) for value, reader in ends):
        replace(node, table)  # positions are always within the sequence
        for view in path:
            update_val(view)
        return
    for value, reader in ends:
        _check_reader(value, reader)
    with graph.inserting_before(node):
        rows = emit(graph, aten.index_select.default, table, dim, _positions_input(graph))
    replace(node, rows)


def _through_views(node: fx.Node) -> tuple[list[fx.Node], list[tuple[fx.Node, fx.Node]]]:
    """The views and casts of a value, and (value, reader) for every other use of them."""
    path: list[fx.Node] = []
    ends = []
    for value in (values := [node]):
        for reader in value.users:
            if is_call(reader, *_VIEWS, *CASTS):
                path.append(reader)
                values.append(reader)
            else:
                ends.append((value, reader))
    return path, ends


def _looks_up(table: fx.Node, reader: fx.Node) -> bool:
    """Whether it is table[positions], where the table is at most cast, or its sizes of 1 left out
    before the rows."""
    if _growing(table) != [0] or not is_call(reader, *_LOOK_UPS):
        return False
    while is_call(table, *CASTS, *_SQUEEZES):
        table = table.args[0]  # type: ignore[assignment]
    if is_call(table, *_VIEWS):
        return False
    if is_call(reader, aten.index_select.default) and reader.args[1] != 0:
        return False
    index: Any = reader.args[-1]
    index = index[0] if isinstance(index, list | tuple) else index
    return input_of(through(index, *_VIEWS, *CASTS)) == StepInput(name="positions")


def _refuse_numbers(node: fx.Node) -> None:
    """Raise CompileError if the number of tokens is used as a value, where it would be that of all
    requests together. Using it as a size is fine."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target in _COUNTING or _is_written(node):
        return
    given = {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    for argument in schema.arguments:
        sizes = [n for n in _nodes(given.get(argument.name)) if _is_size(n)]
        if not sizes:
            continue
        is_value = any(kind in str(argument.type) for kind in ("Tensor", "number", "float"))
        if is_value or (node.target in _CUTS and not _is_cut_by_tokens(node)):
            raise CompileError(
                f"the model's code computes with the number of tokens ({node.target} in "
                f"{node.name}), which in a step is that of all requests together; such models are "
                "not supported yet"
            )


def _is_cut_by_tokens(node: fx.Node) -> bool:
    """Whether the first argument is cut along its token dimension."""
    args: Any = node.args
    dim = args[1] if len(args) > 1 else 0
    return isinstance(val(args[0]).shape[dim], torch.SymInt)


def _nodes(arg: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(arg, nodes.append)
    return nodes


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _find(graph: fx.Graph) -> _Counted:
    found = _Counted()
    known: list[dict[fx.Node, Any]] = [{} for _ in _LENGTHS]  # computed values, by length
    for node in graph.nodes:
        if not _is_counted(node, found):
            continue
        sources = [] if node.target in _OF_A_SHAPE else node.all_input_nodes
        if any(source in found.others for source in sources):
            found.others.add(node)
        elif any(source in found.counts or source in found.derived for source in sources):
            found.derived.add(node)
        else:
            for values, length in zip(known, _LENGTHS, strict=True):
                values[node] = _run(graph, node, torch.arange(length), values)
            _sort_in(node, [values[node] for values in known], found)
    return found


def _is_counted(node: fx.Node, found: _Counted) -> bool:
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor) or writes(node):
        return False
    if _is_written(node):
        return False
    if node.target in _OF_A_SHAPE:
        return bool(_growing(node))
    sources = node.all_input_nodes
    known = {s for s in sources if _is_size(s) or s in found}
    return bool(known) and all(
        s in known or isinstance(input_of(s), ConstantInput) for s in sources
    )


def _is_written(node: fx.Node) -> bool:
    """Whether it is a part of a buffer that every step overwrites, packed like the step."""
    return bool(node.users) and all(writes(user) and user.args[0] is node for user in node.users)


def _growing(node: fx.Node) -> list[int]:
    """The dimensions whose size depends on the number of tokens."""
    return [i for i, size in enumerate(val(node).shape) if isinstance(size, torch.SymInt)]


def _sort_in(node: fx.Node, values: list[Tensor], found: _Counted) -> None:
    """Classify a node by its values for several sequence lengths."""
    row = values[0]
    for dim in _growing(node):
        row = row[(slice(None),) * dim + (slice(0, 1),)]
    if row.numel() and all(torch.equal(value, row.expand_as(value)) for value in values):
        found.same.add(node)
        return
    first = int(row.flatten()[0]) if row.numel() == 1 else 0
    counts = [first + torch.arange(n).to(row.dtype) for n in _LENGTHS]
    if all(torch.equal(v.flatten(), count) for v, count in zip(values, counts, strict=True)):
        found.counts[node] = first
    else:
        found.others.add(node)


def _is_read(node: fx.Node, found: _Counted) -> bool:
    """Whether it has a reader that does not depend only on the number of tokens."""
    return any(reader not in found for reader in node.users)


def _left_alone(node: fx.Node) -> str:
    """A note on a value that is left unchanged because its rows are not tokens. Raises CompileError
    if they are."""
    sizes = [str(val(node).shape[dim]) for dim in _growing(node)]
    if not sizes or str(val(_tokens(node.graph)).shape[0]) in sizes:
        raise _refused(node, "is not a row for each token that depends only on its position")
    return f"{node.name} left unchanged: it has {sizes[0]} rows, which are not the tokens"


def _refused(node: fx.Node, why: str) -> CompileError:
    return CompileError(
        f"the model's code numbers the tokens of a step, which are those of all requests together, "
        f"and a value computed from these numbers ({node.target} in {node.name}) {why}; such "
        "models are not supported yet"
    )


def _check_reader(node: fx.Node, reader: fx.Node) -> None:
    """Raise CompileError unless the reader keeps each row with its token."""
    is_rows = isinstance(reader.meta.get("val"), Tensor) and (
        [str(val(reader).shape[dim]) for dim in _growing(reader)]
        == [str(val(node).shape[dim]) for dim in _growing(node)]
        == [str(val(_tokens(node.graph)).shape[0])]
    )
    if is_call(reader, *_LOOK_UPS):
        is_fine = not _growing(reader.args[0])  # type: ignore[arg-type]
    elif is_call(reader, *_PRODUCTS):
        is_fine = not _sums_over_tokens(node, reader)
    else:
        tags = getattr(reader.target, "tags", ())
        is_fine = torch.Tag.pointwise in tags or is_call(reader, *_ROW_BY_ROW)
    if not (is_rows and is_fine):
        raise _refused(node, f"is read by {reader.target}, which may mix rows")


def _sums_over_tokens(node: fx.Node, product: fx.Node) -> bool:
    """Whether a matrix product with this value sums over the tokens. That of a column of
    frequencies and a row of positions, as in many rotary embeddings, does not."""
    left, right = product.args
    dims, growing = val(node).dim(), _growing(node)
    return (left is node and dims - 1 in growing) or (right is node and max(dims - 2, 0) in growing)


def _run(
    graph: fx.Graph,
    target: fx.Node,
    positions: Tensor,
    known: dict[fx.Node, Any] | None = None,
) -> Tensor:
    """The value of `target` for tokens at these positions [T]."""
    length = len(positions)
    given: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if _is_size(node):
            given[node] = _at(node.meta["val"], length)
        elif input_of(node) == StepInput(name="positions"):
            given[node] = positions
        elif is_call(node, *_OF_A_SHAPE):
            given[node] = _of_a_shape(node, length)
        if node is target:
            break
    try:
        return evaluate(graph, target, length, given | (known or {}))
    except (NotEvaluable, RuntimeError, IndexError) as e:
        raise _refused(target, f"can't be computed ({' '.join(str(e).split())[:200]})") from e


def _of_a_shape(node: fx.Node, length: int) -> Tensor:
    source, *rest = node.args
    shape = [_at(size, length) for size in val(source).shape]
    args, kwargs = fx.node.map_arg((rest, node.kwargs), lambda n: _at(n.meta["val"], length))
    made: Tensor = node.target(  # type: ignore[operator]
        torch.zeros(shape, dtype=val(source).dtype), *args, **{**kwargs, "device": "cpu"}
    )
    return made


def _at(size: Any, length: int) -> Any:
    """Evaluate a size that depends on the number of tokens, for `length` tokens."""
    expr = getattr(getattr(size, "node", None), "expr", None)
    if expr is None:
        return size
    number = expr.subs(dict.fromkeys(expr.free_symbols, length))
    return float(number) if isinstance(size, torch.SymFloat) else int(number)


def _positions(graph: fx.Graph, node: fx.Node, first: int) -> fx.Node:
    """The positions with the shape and dtype of `node`, which counts from `first`."""
    made = _positions_input(graph)
    with graph.inserting_before(node):
        if first:
            made = emit(graph, aten.add.Tensor, made, first)
        if val(node).dtype != torch.int64:
            made = emit(graph, aten.to.dtype, made, val(node).dtype)
        if val(node).dim() != 1:
            shape = [-1 if dim in _growing(node) else 1 for dim in range(val(node).dim())]
            made = emit(graph, aten.view.default, made, shape)
    return made


def _positions_input(graph: fx.Graph) -> fx.Node:
    tokens = val(_tokens(graph))
    return step_input(graph, "positions", tokens.new_empty(tokens.shape, dtype=torch.int64))


def _tokens(graph: fx.Graph) -> fx.Node:
    node: fx.Node
    for node in graph.nodes:
        if input_of(node) == StepInput(name="token_ids"):
            return node
    raise AssertionError("the graph reads no tokens")


def _prove(graph: fx.Graph, end: fx.Node, before: list[Tensor], max_positions: int) -> None:
    """Check that the value is unchanged for one sequence, and that rows do not depend on others."""
    for length, value in zip(_LENGTHS, before, strict=True):
        if not torch.equal(_run(graph, end, torch.arange(length)), value):
            raise _refused(end, "changes when it is computed from positions")
    if len(_growing(end)) != 1:
        raise _refused(end, "is not a row for each token")
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(0, max_positions, (_LENGTHS[1],), generator=generator)
    (dim,) = _growing(end)
    every, second = _run(graph, end, some), _run(graph, end, some[::2])
    if not torch.equal(every.movedim(dim, 0)[::2], second.movedim(dim, 0)):
        raise _refused(end, "is not a row for each token that depends only on its position")
