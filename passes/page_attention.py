"""`page_attention`: from attention over the tokens at hand to attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.write_kv import write_kv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, calls, emit, is_call, replace, val
from llmc.passes.inputs import CacheInput, fake_like, input_of, step_input


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The shape of one layer's paged cache and what its attention can see."""

    layer: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int
    chunk: int


@graph_pass(required=True)
def page_attention(gm: fx.GraphModule, *, block_size: int) -> Notes:
    """Write each layer's keys and values to its cache and attend over block tables.

    Before:
        o = llmc.attention(q [1, H, T, D], k, v, key_cache, value_cache, scale, window, ...)
    After:
        llmc.write_kv(k [T, Hkv, D], v, key_cache, value_cache, slot_mapping)
        o = llmc.paged_attention(q [T, H, D], key_cache, value_cache, query_start, context_len,
                                 block_table, scale, window, ...)
    """
    graph = gm.graph
    markers = calls(graph, attention.overload)
    if not markers:
        raise CompileError(
            "no attention was found in the captured graph: the model does not call transformers' "
            "attention interface, so it can't be paged"
        )
    seen: dict[int, str] = {}
    for marker in markers:
        role = input_of(marker.args[3])
        if not isinstance(role, CacheInput):
            raise CompileError(f"{marker.name} has no cache of its own")
        if role.layer in seen:
            raise CompileError(
                f"{marker.name} and {seen[role.layer]} are one module called twice in a step, "
                "which needs a cache for each call and is not supported yet"
            )
        seen[role.layer] = marker.name
        _page(graph, marker, block_size)
    return []


def _page(graph: fx.Graph, marker: fx.Node, block_size: int) -> None:
    query, key, value, key_cache, value_cache, *rest = marker.args
    tokens = next(n for n in graph.nodes if n.op == "placeholder" and _is_flat(n))
    for cache, source in ((key_cache, key), (value_cache, value)):
        assert isinstance(cache, fx.Node) and isinstance(source, fx.Node)
        heads, dim = val(source).shape[1], val(source).shape[3]
        cache.meta["val"] = val(source).new_empty(2, heads, block_size, dim)
    slots = step_input(graph, "slot_mapping", val(tokens).new_empty(val(tokens).shape[0]))
    start = step_input(graph, "query_start", fake_like(tokens, 3, dtype=torch.int32))
    length = step_input(graph, "context_len", fake_like(tokens, 2, dtype=torch.int32))
    table = step_input(graph, "block_table", fake_like(tokens, 2, 2, dtype=torch.int32))
    with graph.inserting_before(marker):
        q, k, v = (_flat(graph, n) for n in (query, key, value))
        emit(graph, write_kv.overload, k, v, key_cache, value_cache, slots)
        out = emit(
            graph,
            paged_attention.overload,
            q,
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
