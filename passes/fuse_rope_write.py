"""`fuse_rope_write`: query/key norm, rotary embedding and cache write become one op per layer."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.rms_norm import rms_norm
from llmc.kernels.rope_write import rope_write
from llmc.kernels.write_kv import write_kv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    CASTS,
    arguments,
    aten,
    calls,
    emit,
    is_call,
    only_user,
    operands,
    set_arguments,
    swapped,
    through,
    val,
)
from llmc.passes.inputs import ConstantInput, StepInput, add_input, input_of

_VIEWS = (aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default)


@dataclass(frozen=True, slots=True)
class _Rotary:
    """x [1, H, T, D], whose first channels are rotated by cos and sin.

    Some models rotate before they transpose the heads to the front: then x is [1, T, H, D].

    Channel i is rotated together with i + Dr / 2, or with its neighbor if interleaved.
    """

    x: fx.Node
    cos: fx.Node  # table placeholders [positions, Dr], or [positions, Dr / 2] when halved
    sin: fx.Node
    halved: bool = False
    interleaved: bool = False
    heads_last: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensor [T, H, D] before norm and rotation, and the norm's parameters."""

    node: fx.Node
    weight: fx.Node | None = None
    eps: float = 0.0
    offset: float = 0.0


@graph_pass()
def fuse_rope_write(gm: fx.GraphModule) -> Notes:
    """Rotate queries and keys (after normalizing them, if the model does) and write the cache in
    one op.

    Pairs of channels are halves or neighbors; all channels or only the first ones are rotated.
    Casts around them are dropped.

    Before:
        q = rotary(llmc.rms_norm(q0), cos_table[positions], sin_table[positions])
        k = rotary(llmc.rms_norm(k0), cos_table[positions], sin_table[positions])
        llmc.write_kv(k, v, key_cache, value_cache, slot_mapping)
        o = llmc.paged_attention(q, ...)
    After:
        q = llmc.rope_write(q0, k0, v, q_norm, k_norm, eps, offset, cos_table, sin_table, positions,
                            interleaved, key_cache, value_cache, slot_mapping)
        o = llmc.paged_attention(q, ...)
    """
    graph = gm.graph
    tables: dict[tuple[fx.Node, bool], fx.Node] = {}
    notes = []
    for write in calls(graph, write_kv.overload):
        readers = arguments(write).key_cache.users
        attend = next((u for u in readers if is_call(u, paged_attention.overload)), None)
        if attend is None:  # this cache holds hidden states for a draft head
            continue
        reason = _fuse(graph, write, attend, tables)
        if reason:
            notes.append(f"{write.name}: {reason}")
    return notes


def _fuse(
    graph: fx.Graph,
    write: fx.Node,
    attend: fx.Node,
    tables: dict[tuple[fx.Node, bool], fx.Node],
) -> str | None:
    """Rewrite one layer; return the reason if it does not match."""
    given = arguments(write)
    query_rope, key_rope = _rotary(arguments(attend).query), _rotary(given.key)
    if query_rope is None or key_rope is None:
        return "no rotary embedding of a known form"
    if (query_rope.cos, query_rope.sin) != (key_rope.cos, key_rope.sin):
        return "query and key read different rotary tables"
    how = (query_rope.halved, query_rope.interleaved)
    if how != (key_rope.halved, key_rope.interleaved):
        return "query and key rotate differently"
    positions = next(n for n in graph.nodes if input_of(n) == StepInput(name="positions"))
    with graph.inserting_before(write):
        ropes = (query_rope, val(arguments(attend).query).dtype), (key_rope, val(given.key).dtype)
        q, k = (_source(graph, rope, dtype) for rope, dtype in ropes)
        if (q.weight is None) != (k.weight is None) or (q.eps, q.offset) != (k.eps, k.offset):
            q, k = (_Source(_flatten(graph, rope, dtype)) for rope, dtype in ropes)
        cos, sin = (
            _table(graph, t, query_rope.halved, tables) for t in (key_rope.cos, key_rope.sin)
        )
        fused = emit(
            graph,
            rope_write.overload,
            query=q.node,
            key=k.node,
            value=given.value,
            query_norm=q.weight,
            key_norm=k.weight,
            eps=q.eps,
            norm_offset=q.offset,
            cos_table=cos,
            sin_table=sin,
            positions=positions,
            interleaved=query_rope.interleaved,
            key_cache=given.key_cache,
            value_cache=given.value_cache,
            slot_mapping=given.slot_mapping,
        )
    set_arguments(attend, query=fused)
    graph.erase_node(write)
    return None


def _rotary(flat: Any) -> _Rotary | None:
    """Match the value that page_attention squeezed, and transposed if its heads came first."""
    node = through(flat, aten.squeeze.dim)
    heads_last = not is_call(node, aten.transpose.int)
    # casts are skipped, here and below: the op uses float32 and rounds once
    node = through(node if heads_last else arguments(node).self, *CASTS)
    found = _turn(node) or _partial(node) or _two_halves(node)
    return found and replace(found, x=through(found.x, *CASTS), heads_last=heads_last)


def _turn(node: Any) -> _Rotary | None:
    """Match x * cos + turned * sin, where turned is x rotated by a quarter turn."""
    if not is_call(node, aten.add.Tensor):
        return None
    for straight, turned in operands(node):
        if not (is_call(straight, aten.mul.Tensor) and is_call(turned, aten.mul.Tensor)):
            continue
        for x, cos in operands(straight):
            for other, sin in operands(turned):
                c, s = _table_of(cos), _table_of(sin)
                if c is None or s is None:
                    continue
                x, other = through(x, *CASTS), through(other, *CASTS)
                if _swaps_halves(other, x):
                    return _Rotary(x, c, s)
                if _swaps_neighbours(other, x):
                    return _Rotary(x, c, s, interleaved=True)
    return None


def _swaps_neighbours(flat: Any, x: Any) -> bool:
    """Whether flat = stack([-x[1::2], x[0::2]], -1).flatten(-2)."""
    if not is_call(flat, aten.flatten.using_ints) or val(flat).dim() != val(x).dim():
        return False
    stack = arguments(flat).self
    if not is_call(stack, aten.stack.default) or len(arguments(stack).tensors) != 2:
        return False
    if arguments(stack).dim not in (-1, val(x).dim()):
        return False
    minus, even = arguments(stack).tensors
    return (
        is_call(minus, aten.neg.default)
        and _slice_is(arguments(minus).self, x, 1, None, step=2)
        and _slice_is(even, x, 0, None, step=2)
    )


def _swaps_halves(cat: Any, x: Any) -> bool:
    """Whether cat = cat(-x[half:], x[:half])."""
    pair = _pair(cat)
    if pair is None or not is_call(pair[0], aten.neg.default):
        return False
    width = val(x).shape[-1]
    minus, first = arguments(pair[0]).self, pair[1]
    return _slice_is(minus, x, width // 2, None) and _slice_is(first, x, 0, width // 2)


def _pair(cat: Any) -> tuple[Any, Any] | None:
    """The two tensors of a concatenation of two."""
    if not is_call(cat, aten.cat.default) or len(arguments(cat).tensors) != 2:
        return None
    first, second = arguments(cat).tensors
    return first, second


def _slice_is(node: Any, source: Any, start: int, end: int | None, *, step: int = 1) -> bool:
    """Whether node is source[..., start:end:step]."""
    node = through(node, *CASTS)
    if not is_call(node, aten.slice.Tensor):
        return False
    cut = arguments(node)
    if through(cut.self, *CASTS) is not source or cut.dim not in (-1, val(source).dim() - 1):
        return False
    if (cut.start or 0) != start or (cut.step or 1) != step:
        return False
    width = val(source).shape[-1]
    high = width if cut.end is None else min(cut.end, width)
    return bool(high == (width if end is None else end))


def _partial(node: Any) -> _Rotary | None:
    """Match cat(rotated first channels, the rest)."""
    pair = _pair(node)
    inner = pair and _turn(pair[0])
    if pair is None or inner is None or not is_call(inner.x, aten.slice.Tensor):
        return None
    rest = pair[1]
    x = through(arguments(inner.x).self, *CASTS)
    width = int(val(inner.x).shape[-1])
    if not (_slice_is(inner.x, x, 0, width) and _slice_is(rest, x, width, None)):
        return None
    return replace(inner, x=x)


def _two_halves(node: Any) -> _Rotary | None:
    """Match cat(a cos - b sin, b cos + a sin) with a, b the two halves of x."""
    minus: Any
    plus: Any
    minus, plus = _pair(node) or (None, None)
    if not (is_call(minus, aten.sub.Tensor) and is_call(plus, aten.add.Tensor)):
        return None
    a_cos, b_sin = arguments(minus).self, arguments(minus).other
    if not (is_call(a_cos, aten.mul.Tensor) and is_call(b_sin, aten.mul.Tensor)):
        return None
    a, b = arguments(a_cos).self, arguments(b_sin).self
    cos, sin = _table_of(arguments(a_cos).other), _table_of(arguments(b_sin).other)
    x = _source_of_halves(a, b)
    if cos is None or sin is None or x is None:
        return None
    for b_cos, a_sin in operands(plus):
        if _is_product(b_cos, b, cos) and _is_product(a_sin, a, sin):
            return _Rotary(x, cos, sin, halved=True)
    return None


def _is_product(node: Any, half: Any, table: fx.Node) -> bool:
    if not is_call(node, aten.mul.Tensor):
        return False
    given = arguments(node)
    return given.self is half and _table_of(given.other) is table


def _source_of_halves(a: Any, b: Any) -> fx.Node | None:
    if not (is_call(a, operator.getitem) and is_call(b, operator.getitem)):
        return None
    first, second = arguments(a), arguments(b)
    chunk = first.source
    if second.source is not chunk or (first.index, second.index) != (0, 1):
        return None
    if not is_call(chunk, aten.chunk.default) or arguments(chunk).chunks != 2:
        return None
    source: fx.Node = arguments(chunk).self
    return source if arguments(chunk).dim in (-1, val(source).dim() - 1) else None


def _table_of(node: Any) -> fx.Node | None:
    """The table placeholder whose rows for the tokens' positions a value is, looking through views.
    The fused op reads its rows by these positions too."""
    node = through(node, *_VIEWS)
    if not is_call(node, aten.index_select.default):
        return None
    if input_of(arguments(node).index) != StepInput(name="positions"):
        return None
    table: fx.Node = arguments(node).self
    return table if isinstance(input_of(table), ConstantInput) else None


def _flatten(graph: fx.Graph, rope: _Rotary, dtype: torch.dtype) -> fx.Node:
    """[1, H, T, D] or [1, T, H, D] -> [T, H, D] in `dtype`, the dtype of the rotated result."""
    x = rope.x
    if rope.heads_last:
        source: Any = x
    else:
        source = swapped(x, 1, 2) or emit(graph, aten.transpose.int, x, 1, 2)
    flat = emit(graph, aten.squeeze.dim, source, 0)
    return flat if val(flat).dtype == dtype else emit(graph, aten.to.dtype, flat, dtype)


def _source(graph: fx.Graph, rope: _Rotary, dtype: torch.dtype) -> _Source:
    """The value before the per-head norm, if nothing else reads the normalized value."""
    x = rope.x
    heads_last: Any = arguments(x).self if is_call(x, aten.transpose.int) else None
    if rope.heads_last:
        heads_last = x
    if is_call(heads_last, rms_norm.overload) and (heads_last is x or only_user(heads_last) is x):
        norm = arguments(heads_last)
        is_whole = norm.weight is not None and val(norm.weight).shape[0] == val(x).shape[-1]
        if is_whole and val(x).dtype == dtype:
            flat = emit(graph, aten.squeeze.dim, norm.x, 0)
            return _Source(flat, norm.weight, norm.eps, norm.offset)
    return _Source(_flatten(graph, rope, dtype))


def _table(
    graph: fx.Graph, table: fx.Node, halved: bool, made: dict[tuple[fx.Node, bool], fx.Node]
) -> fx.Node:
    """The same table in float32, doubled if it holds one half; created once, if needed."""
    role = input_of(table)
    assert isinstance(role, ConstantInput)
    rows = role.tensor
    if rows.dtype == torch.float32 and rows.dim() == 2 and rows.is_contiguous() and not halved:
        return table  # usable as is; layers that are not fused may read it too
    if (table, halved) not in made:
        rows = rows.flatten(1).float()
        rows = torch.cat((rows, rows), -1) if halved else rows
        fake = val(table).new_empty(rows.shape, dtype=torch.float32)
        made[table, halved] = add_input(
            graph, f"{table.name}_f32", ConstantInput(tensor=rows.contiguous()), fake
        )
    return made[table, halved]
