"""`page_entries`: tokens and the entries that stand for several of them share one paged cache.

A block of B tokens has B + E rows: first the entries that end in it, then its tokens. E is their
maximum number, B / rate rounded up. An entry is stored in the block of its last token and is shared
with that block, so block tables, prefix caching and forks need no knowledge of entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.kernels.cache_dtype import narrower
from llmc.kernels.choose_keys import choose_keys
from llmc.kernels.entries import entry_attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.write_kv import write_kv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, replace, val
from llmc.passes.inputs import CacheInput, add_input, input_of, step_input


@graph_pass(required=True)
def page_entries(
    gm: fx.GraphModule,
    *,
    block_size: int,
    max_positions: int,
    cache_dtype: torch.dtype | None = None,
    long_texts: bool = False,
) -> Notes:
    """Write tokens and entries to one cache, and attend to chosen rows of it: a window of tokens
    and either all entries or those with the highest scores.

    If an index would choose all entries of a context of `max_positions` tokens, it is dropped. If
    no context has an entry, only attention to the window remains. Raises CompileError if long
    sequences have their own rotary frequencies (`long_texts`), since positions are then not indices
    into a request. The cache has the dtype that `page_attention` would give it, but is never int8.

    Before:
        o = llmc.entry_attention(q [1, H, T, D], k, entry [T, D], iq, ik, iw, key_cache, ...)
    After:
        llmc.write_kv(aten.cat([k, entry]) [2 * T, 1, D], ..., key_cache [blocks, 1, B + E, D], ...)
        i = llmc.choose_keys(iq, ik, iw, index_cache [blocks, 1, B / rate, Di], ..., top_k, rate)
        rows [T, 1, window + top_k] = rows of the tokens of the window, and of the entries i
        o = llmc.paged_attention(q, key_cache, key_cache, ..., chosen=rows)
    """
    graph = gm.graph
    notes = []
    steps: dict[int, _Step] = {}
    for marker in calls(graph, entry_attention.overload):
        given = arguments(marker)
        if long_texts:
            raise CompileError(
                f"{marker.name} attends to entries that stand for several tokens, in a model with "
                "different rotary frequencies for long sequences, which llmc does not support"
            )
        count = max_positions // given.rate  # entries in the longest context
        with graph.inserting_before(marker):
            if count == 0:
                notes.append(f"{marker.name}: no sequence is long enough to have an entry")
                _leave_window(graph, marker)
                continue
            if given.rate not in steps:
                steps[given.rate] = _Step(graph, block_size, given.rate)
            step = steps[given.rate]
            if given.index_query is None or given.top_k >= count:
                shown = step.once(_Step.all_entries, count)
            else:
                shown = step.rows_of(_choose(graph, marker, step))
            _page(graph, marker, step, shown, cache_dtype)
    return notes


class _Step:
    """Emits row numbers from a step's positions and slots, for layers whose entries stand for
    `rate` tokens each. Divisions round down, so negative numbers stay negative."""

    def __init__(self, graph: fx.Graph, tokens: int, rate: int) -> None:
        self.graph = graph
        self.tokens = tokens  # per block
        self.rate = rate
        self.extra = -(-tokens // rate)  # rows per block for entries
        self.positions = step_input(graph, "positions")  # [T]
        self.slots = step_input(graph, "slot_mapping")  # [T]: block * tokens + offset
        self._made: dict[Any, fx.Node] = {}

    def once(self, what: Callable[..., fx.Node], *given: int) -> fx.Node:
        """A method's result, emitted only for the first layer that needs it."""
        key = (what.__name__, *given)
        if key not in self._made:
            self._made[key] = what(self, *given)
        return self._made[key]

    def context(self) -> fx.Node:
        """[R]: the length of each context in rows; a block has its entries before its tokens."""
        m, length = _Numbers(self.graph), step_input(self.graph, "context_len")
        blocks = m.over(m.add(length, self.tokens - 1), self.tokens)
        return m.add(length, m.times(blocks, self.extra))

    def slots_of_rows(self) -> fx.Node:
        """[2 * T]: slots of the tokens, then of the entries that end with them."""
        own = self._row(self.slots)
        return _joined(self.graph, [own, self.ending(self.tokens + self.extra)], 0)

    def ending(self, rows: int) -> fx.Node:
        """[T]: the slot of the entry that ends with a token, in blocks of `rows` rows, or -1."""
        m = _Numbers(self.graph)
        # its index in the block: the number of entries before it, less those before its block
        first = m.over(m.times(m.over(self.positions, self.tokens), self.tokens), self.rate)
        inside = m.sub(m.over(self.positions, self.rate), first)
        row = m.add(m.times(m.over(self.slots, self.tokens), rows), inside)
        is_last = m.equal(m.rest(self.positions, self.rate), self.rate - 1)
        is_live = emit(self.graph, aten.ge.Scalar, self.slots, 0)
        is_written = emit(self.graph, aten.logical_and.default, is_last, is_live)
        return emit(self.graph, aten.where.ScalarOther, is_written, row, -1)

    def rows_of(self, number: fx.Node) -> fx.Node:
        """Rows of entries in a request's context, by their numbers; negative for a number of -1."""
        m = _Numbers(self.graph)
        block = m.over(m.add(m.times(number, self.rate), self.rate - 1), self.tokens)
        first = m.over(m.times(block, self.tokens), self.rate)
        return m.add(m.times(block, self.tokens + self.extra), m.sub(number, first))

    def all_entries(self, count: int) -> fx.Node:
        """[T, count]: rows of the entries that are visible to each token, or -1."""
        m = _Numbers(self.graph)
        number = m.count(self.positions, count)
        ended = m.column(m.over(m.add(self.positions, 1), self.rate))
        is_seen = emit(self.graph, aten.lt.Tensor, number, ended)
        return emit(self.graph, aten.where.ScalarOther, is_seen, self.rows_of(number), -1)

    def window(self, size: int) -> fx.Node:
        """[T, size]: rows of a token and those before it; negative where there are none."""
        m = _Numbers(self.graph)
        return self._row(m.sub(m.column(self.positions), m.count(self.positions, size)))

    def _row(self, token: fx.Node) -> fx.Node:
        """The row of a token, from its index or slot in blocks of tokens."""
        m = _Numbers(self.graph)
        block = m.times(m.over(token, self.tokens), self.tokens + self.extra)
        return m.add(m.add(block, m.rest(token, self.tokens)), self.extra)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Emits integer arithmetic; divisions round down."""

    graph: fx.Graph

    def add(self, a: Any, b: Any) -> fx.Node:
        return emit(self.graph, aten.add.Tensor, a, b)

    def sub(self, a: Any, b: Any) -> fx.Node:
        return emit(self.graph, aten.sub.Tensor, a, b)

    def times(self, a: fx.Node, b: int) -> fx.Node:
        return emit(self.graph, aten.mul.Tensor, a, b)

    def over(self, a: fx.Node, b: int) -> fx.Node:
        return emit(self.graph, aten.floor_divide.Scalar, a, b)

    def rest(self, a: fx.Node, b: int) -> fx.Node:
        return emit(self.graph, aten.remainder.Scalar, a, b)

    def column(self, a: fx.Node) -> fx.Node:
        return emit(self.graph, aten.unsqueeze.default, a, 1)

    def equal(self, a: fx.Node, b: int) -> fx.Node:
        return emit(self.graph, aten.eq.Scalar, a, b)

    def count(self, like: fx.Node, n: int) -> fx.Node:
        """[1, n]: 0, 1, ... n - 1"""
        ones = emit(self.graph, aten.new_ones.default, like, [1, n])
        return self.sub(emit(self.graph, aten.cumsum.default, ones, 1), 1)


def _leave_window(graph: fx.Graph, marker: fx.Node) -> None:
    given = arguments(marker)
    names = ("query", "key", "key_cache", "value_cache", "scale", "window", "softcap", "sinks")
    same = {name: getattr(given, name) for name in names}
    limits = {"chunk": 0, "slopes": None}
    replace(marker, emit(graph, attention.overload, **same, **limits, value=given.key))


def _choose(graph: fx.Graph, marker: fx.Node, step: _Step) -> fx.Node:
    """[T, top_k] int32: numbers of entries."""
    given = arguments(marker)
    if step.tokens % step.rate:
        raise CompileError(
            f"the model chooses among entries that stand for {step.rate} tokens each, and the "
            f"block size of {step.tokens} is not a multiple of that: set block_size to a multiple "
            f"of {step.rate} (it must be a power of two)"
        )
    rows = step.tokens // step.rate
    roles = [input_of(n) for n in graph.nodes if n.op == "placeholder"]
    layer = 1 + max((role.layer for role in roles if isinstance(role, CacheInput)), default=-1)
    role = CacheInput(layer=layer, part="key", tokens=step.tokens)
    empty = val(given.index_key).new_empty(2, 1, rows, val(given.index_key).shape[1])
    names = ("query_start", "context_len", "block_table")
    return emit(
        graph,
        choose_keys.overload,
        query=given.index_query,
        key=given.index_key,
        weights=given.index_weights,
        key_cache=add_input(graph, f"index_cache_{layer}", role, empty),
        slot_mapping=step.once(_Step.ending, rows),
        **{name: step_input(graph, name) for name in names},
        top_k=given.top_k,
        rate=step.rate,
    )


def _page(
    graph: fx.Graph,
    marker: fx.Node,
    step: _Step,
    shown: fx.Node,
    cache_dtype: torch.dtype | None,
) -> None:
    given = arguments(marker)
    key = _flat(graph, given.key)
    dim, own = val(key).shape[2], val(key).dtype
    dtype = own if cache_dtype == torch.int8 else narrower(own, cache_dtype)
    for part, cache, width in (("key", given.key_cache, dim), ("value", given.value_cache, 0)):
        old = input_of(cache)
        if not isinstance(old, CacheInput) or old.tokens:
            raise CompileError(f"{marker.name} has no cache of its own, which is not supported")
        cache.meta["input"] = CacheInput(
            layer=old.layer, part="key" if part == "key" else "value", tokens=step.tokens
        )
        cache.meta["val"] = val(key).new_empty(2, 1, step.tokens + step.extra, width, dtype=dtype)
    rows = _joined(graph, [key, emit(graph, aten.unsqueeze.default, given.entry, 1)], 0)
    emit(
        graph,
        write_kv.overload,
        key=rows,
        value=emit(graph, aten.slice.Tensor, rows, 2, 0, 0),
        key_cache=given.key_cache,
        value_cache=given.value_cache,
        slot_mapping=step.once(_Step.slots_of_rows),
    )
    near = step.once(_Step.window, given.window)
    int32 = [emit(graph, aten.to.dtype, n, torch.int32) for n in (near, shown)]
    chosen = emit(graph, aten.unsqueeze.default, _joined(graph, int32, 1), 1)
    out = emit(
        graph,
        paged_attention.overload,
        query=_flat(graph, given.query),
        key_cache=given.key_cache,
        value_cache=given.key_cache,  # entries and tokens are their own values
        query_start=step_input(graph, "query_start"),
        context_len=step.once(_Step.context),
        block_table=step_input(graph, "block_table"),
        scale=given.scale,
        window=0,
        chunk=0,
        softcap=given.softcap,
        sinks=given.sinks,
        slopes=None,
        chosen=chosen,
    )
    replace(marker, emit(graph, aten.unsqueeze.default, out, 0))


def _joined(graph: fx.Graph, nodes: Sequence[fx.Node], dim: int) -> fx.Node:
    return emit(graph, aten.cat.default, list(nodes), dim)


def _flat(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """[1, H, T, D] -> [T, H, D]"""
    turned = emit(graph, aten.transpose.int, node, 1, 2)
    return emit(graph, aten.squeeze.dim, turned, 0)
