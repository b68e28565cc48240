"""`page_attention`: from attention over the tokens at hand to attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.write_kv import write_kv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, calls, emit, is_call, replace, val
from llmc.passes.inputs import CacheInput, add_input, fake_like, input_of, step_input


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The shape of a paged cache, which one layer of each group has for its own (group_caches)."""

    layer: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


@graph_pass(required=True)
def page_attention(
    gm: fx.GraphModule, *, block_size: int, cache_dtype: torch.dtype | None = None
) -> Notes:
    """Write each layer's keys and values to its cache and attend over block tables.

    `cache_dtype` None: caches are of the model's own dtype. Layers that attend to the keys and
    values of an earlier one read its cache; a module that is called twice has a cache for each.

    Before:
        o = llmc.attention(q [1, H, T, D], k, v, key_cache, value_cache, scale, window, ...)
    After:
        llmc.write_kv(k [T, Hkv, D], v, key_cache, value_cache, slot_mapping)
        o = llmc.paged_attention(q [T, H, D], key_cache, value_cache, query_start, context_len,
                                 block_table, scale, window, ...)
    """
    graph = gm.graph
    notes = []
    owners: dict[int, str] = {}  # cache layer -> the marker that writes it
    written: dict[tuple[Any, Any], tuple[Any, Any]] = {}  # (key, value) -> their caches
    for marker in calls(graph, attention.overload):
        role = input_of(marker.args[3])
        if not isinstance(role, CacheInput):
            raise CompileError(f"{marker.name} has no cache of its own")
        tensors = (marker.args[1], marker.args[2])
        if tensors in written:
            notes.append(f"{marker.name} reads the keys and values of an earlier layer")
            marker.args = (*marker.args[:3], *written[tensors], *marker.args[5:])
            _page(graph, marker, write=False)
            continue
        if role.layer in owners:
            notes.append(f"{marker.name} and {owners[role.layer]} are one module called twice")
            _give_caches(graph, marker)
        else:
            owners[role.layer] = marker.name
        written[tensors] = (marker.args[3], marker.args[4])
        _size_caches(marker, block_size, cache_dtype)
        _page(graph, marker, write=True)
    return notes


def _give_caches(graph: fx.Graph, marker: fx.Node) -> None:
    """Caches of its own for a call whose module's are taken: the next numbers."""
    roles = [input_of(n) for n in graph.nodes if n.op == "placeholder"]
    layer = 1 + max(role.layer for role in roles if isinstance(role, CacheInput))
    fakes = [val(marker.args[i]) for i in (3, 4)]
    caches = (
        add_input(graph, f"key_cache_{layer}", CacheInput(layer=layer, part="key"), fakes[0]),
        add_input(graph, f"value_cache_{layer}", CacheInput(layer=layer, part="value"), fakes[1]),
    )
    marker.args = (*marker.args[:3], *caches, *marker.args[5:])


def _size_caches(marker: fx.Node, block_size: int, cache_dtype: torch.dtype | None) -> None:
    _, key, value, key_cache, value_cache, *_ = marker.args
    for cache, source in ((key_cache, key), (value_cache, value)):
        assert isinstance(cache, fx.Node)
        heads, dim = val(source).shape[1], val(source).shape[3]
        dtype = cache_dtype or val(source).dtype
        cache.meta["val"] = val(source).new_empty(2, heads, block_size, dim, dtype=dtype)


def _page(graph: fx.Graph, marker: fx.Node, *, write: bool) -> None:
    query, key, value, key_cache, value_cache, *rest = marker.args
    tokens = next(n for n in graph.nodes if n.op == "placeholder" and _is_flat(n))
    slots = step_input(graph, "slot_mapping", val(tokens).new_empty(val(tokens).shape[0]))
    start = step_input(graph, "query_start", fake_like(tokens, 3, dtype=torch.int32))
    length = step_input(graph, "context_len", fake_like(tokens, 2, dtype=torch.int32))
    table = step_input(graph, "block_table", fake_like(tokens, 2, 2, dtype=torch.int32))
    with graph.inserting_before(marker):
        if write:
            k, v = _flat(graph, key), _flat(graph, value)
            emit(graph, write_kv.overload, k, v, key_cache, value_cache, slots)
        out = emit(
            graph,
            paged_attention.overload,
            _flat(graph, query),
            key_cache,
            value_cache,
            start,
            length,
            table,
            *rest,
        )
        batched = emit(graph, aten.unsqueeze.default, out, 0)
    replace(marker, batched)


def _is_flat(node: fx.Node) -> bool:
    return getattr(node.meta["input"], "name", "") in ("token_ids", "positions")


def _flat(graph: fx.Graph, node: object) -> fx.Node:
    """[1, H, T, D] -> [T, H, D], straight from the tensor that was transposed, if one was."""
    assert isinstance(node, fx.Node)
    if is_call(node, aten.transpose.int) and tuple(node.args[1:3]) in ((1, 2), (2, 1)):
        source = node.args[0]
    else:
        source = emit(graph, aten.transpose.int, node, 1, 2)
    return emit(graph, aten.squeeze.dim, source, 0)
