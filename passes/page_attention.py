"""`page_attention`: from attention over the step's tokens to attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.kernels.cache_dtype import cache_rows, narrower
from llmc.kernels.encoder_attention import encoder_attention
from llmc.kernels.latent_attention import latent_attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.write_kv import write_kv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    is_call,
    replace,
    set_arguments,
    swapped,
    val,
)
from llmc.passes.inputs import CacheInput, add_input, input_of, step_input


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The shape of a paged cache, which is used by one layer of each group (group_caches)."""

    layer: int
    kv_heads: int
    head_dim: int
    v_head_dim: int  # 0: only keys, as for a sparse indexer or if values are a part of the keys
    dtype: torch.dtype
    rows: int = 1  # a block has so many rows of keys for every `tokens` tokens
    v_rows: int = 1  # the same for values
    tokens: int = 1

    @property
    def bytes_per_token(self) -> int:
        channels = self.rows * self.head_dim + self.v_rows * self.v_head_dim
        return -(-self.kv_heads * channels * self.dtype.itemsize // self.tokens)


@graph_pass(required=True)
def page_attention(
    gm: fx.GraphModule,
    *,
    block_size: int,
    cache_dtype: torch.dtype | None = None,
    encoder: bool = False,
) -> Notes:
    """Write each layer's keys and values to its cache and attend over block tables.

    `cache_dtype` None: caches have the model's own dtype, as those of layers have for which
    `cache_dtype` would not be narrower, or is int8 and not supported: heads whose size is not a
    multiple of 4, values that are channels of the keys, chosen positions. Layers that attend to the
    keys and values of an earlier layer read its cache; a module that is called twice has a cache
    for each call.

    Bidirectional attention needs no cache, since all tokens of a sequence are in one step; this
    holds only for an `encoder`. Raises CompileError if another model has such attention.

    Attention to chosen positions (find_indexers) is paged in the same way. Values that are the
    first channels of the keys are not cached separately: the value cache has width 0, and v_dim is
    the number of these channels. This is the case for latents (absorb_mla), whose weight is passed
    to latent_attention.

    Before:
        o = llmc.attention(q [1, H, T, D], k, v, key_cache, value_cache, scale, window, ...)
    After:
        llmc.write_kv(k [T, Hkv, D], v, key_cache, value_cache, slot_mapping)
        o = llmc.paged_attention(q [T, H, D], key_cache, value_cache, query_start, context_len,
                                 block_table, scale, window, ...)
        or, of a latent whose weight is w:
        o = llmc.latent_attention(q [T, H, D], w, key_cache, query_start, ...)
        or, not causal:
        o = llmc.encoder_attention(q [T, H, D], k [T, Hkv, D], v, query_start, scale, window)
    """
    graph = gm.graph
    notes = []
    owners: dict[int, str] = {}  # cache layer -> the marker that writes it
    written: dict[tuple[Any, Any], tuple[Any, Any]] = {}  # (key, value) -> their caches
    for marker in calls(graph, attention.overload):
        given = arguments(marker)
        if not given.causal:
            if not encoder:
                raise CompileError(
                    "the model's attention is bidirectional, as in an encoder, but its config does "
                    "not say that it is an encoder"
                )
            _attend_both_ways(graph, marker)
            continue
        role = input_of(given.key_cache)
        if not isinstance(role, CacheInput):
            raise CompileError(f"{marker.name} has no cache")
        tensors = (given.key, given.value)
        if tensors in written:
            notes.append(f"{marker.name} reads the keys and values of an earlier layer")
            key_cache, value_cache = written[tensors]
            set_arguments(marker, key_cache=key_cache, value_cache=value_cache)
            _page(graph, marker, write=False)
            continue
        if role.layer in owners:
            notes.append(f"{marker.name} and {owners[role.layer]} are one module called twice")
            _give_caches(graph, marker)
        else:
            owners[role.layer] = marker.name
        given = arguments(marker)
        written[tensors] = (given.key_cache, given.value_cache)
        dtype = narrower(val(given.key).dtype, cache_dtype)
        if dtype == torch.int8 and (reason := _needs_floats(given)):
            dtype = val(given.key).dtype
            notes.append(f"{marker.name}: the cache is {str(dtype)[6:]}, not int8: {reason}")
        _size_caches(marker, block_size, dtype)
        _page(graph, marker, write=True)
    return notes


def _attend_both_ways(graph: fx.Graph, marker: fx.Node) -> None:
    given = arguments(marker)
    bounds = step_input(graph, "query_start")
    with graph.inserting_before(marker):
        tensors = [_flat(graph, x) for x in (given.query, given.key, given.value)]
        out = emit(graph, encoder_attention.overload, *tensors, bounds, given.scale, given.window)
        batched = emit(graph, aten.unsqueeze.default, out, 0)
    replace(marker, batched)


def _give_caches(graph: fx.Graph, marker: fx.Node) -> None:
    """Add caches, with the next numbers, for a call whose module's caches are already in use."""
    roles = [input_of(n) for n in graph.nodes if n.op == "placeholder"]
    layer = 1 + max(role.layer for role in roles if isinstance(role, CacheInput))
    given = arguments(marker)
    key, value = CacheInput(layer=layer, part="key"), CacheInput(layer=layer, part="value")
    set_arguments(
        marker,
        key_cache=add_input(graph, f"key_cache_{layer}", key, val(given.key_cache)),
        value_cache=add_input(graph, f"value_cache_{layer}", value, val(given.value_cache)),
    )


def _needs_floats(given: Any) -> str:
    """Why an attention's caches can't be int8; empty if they can."""
    dims = [int(val(x).shape[3]) for x in (given.key, given.value)]
    if _shared_channels(given.key, given.value):
        return "values are channels of the keys"
    if given.chosen is not None:
        return "each query reads the positions that were chosen for it"
    if any(dim % 4 for dim in dims):
        return f"heads of {dims[0]} and {dims[1]} channels are not all multiples of 4"
    return ""


def _size_caches(marker: fx.Node, block_size: int, dtype: torch.dtype) -> None:
    given = arguments(marker)
    for cache, source in ((given.key_cache, given.key), (given.value_cache, given.value)):
        heads, dim = val(source).shape[1], val(source).shape[3]
        if source is given.value and _shared_channels(given.key, given.value):
            dim = 0
        rows = cache_rows(block_size, dim, dtype)
        cache.meta["val"] = val(source).new_empty(2, heads, rows, dim, dtype=dtype)


def _shared_channels(key: Any, value: Any) -> int:
    """The number of channels of the values if they are the first channels of the keys; else 0."""
    if not is_call(value, aten.slice.Tensor):
        return 0
    cut = arguments(value)
    is_first = cut.self is key and cut.dim in (-1, 3) and not cut.start and cut.step == 1
    return int(val(value).shape[3]) if is_first else 0


def _page(graph: fx.Graph, marker: fx.Node, *, write: bool) -> None:
    given = arguments(marker)
    names = ("query_start", "context_len", "block_table")
    bounds = {name: step_input(graph, name) for name in names}
    slots = step_input(graph, "slot_mapping")
    caches = {"key_cache": given.key_cache, "value_cache": given.value_cache}
    kind = ("scale", "window", "chunk", "softcap", "sinks", "slopes")
    how = {name: getattr(given, name) for name in kind}
    shared = _shared_channels(given.key, given.value)
    with graph.inserting_before(marker):
        if write:
            key = _flat(graph, given.key)
            emit(
                graph,
                write_kv.overload,
                key=key,
                value=emit(graph, aten.slice.Tensor, key, 2, 0, 0)
                if shared
                else _flat(graph, given.value),
                **caches,
                slot_mapping=slots,
            )
        query = _flat(graph, given.query)
        if given.weight is not None:
            out = emit(
                graph,
                latent_attention.overload,
                query=query,
                weight=given.weight,
                key_cache=given.key_cache,
                **bounds,
                **how,
            )
        else:
            out = emit(
                graph,
                paged_attention.overload,
                query=query,
                **caches,
                **bounds,
                **how,
                chosen=given.chosen,
                sparse_block_size=given.sparse_block_size,
                v_dim=shared,
                distance_bias=None
                if given.distance_bias is None
                else _flat(graph, given.distance_bias),
            )
        batched = emit(graph, aten.unsqueeze.default, out, 0)
    replace(marker, batched)


def _flat(graph: fx.Graph, node: object) -> fx.Node:
    """[1, H, T, D] -> [T, H, D]; undoes a transpose by reading its source."""
    assert isinstance(node, fx.Node)
    source = swapped(node, 1, 2)
    if source is None:
        source = emit(graph, aten.transpose.int, node, 1, 2)
    return emit(graph, aten.squeeze.dim, source, 0)
