"""`fuse_rope_write`: query/key norm, rotary embedding and cache write become one op per layer."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from llmc.kernels.latent_attention import latent_attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.rms_norm import rms_norm
from llmc.kernels.rope_write import rope_write
from llmc.kernels.rope_write_latent import rope_write_latent
from llmc.kernels.write_kv import write_kv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    is_call,
    keeps_order,
    only_user,
    reshaped,
    set_arguments,
    swapped,
    val,
)
from llmc.passes.inputs import StepInput, input_of
from llmc.passes.rotary import Rotary, find_last_rotary, find_rotary, tables_of

_UNKNOWN = "no rotary embedding of a known form"


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensor, [T, H, D] for heads, before norm and rotation, and the norm's parameters."""

    node: fx.Node
    weight: fx.Node | None = None
    eps: float = 0.0
    offset: float = 0.0


@graph_pass()
def fuse_rope_write(gm: fx.GraphModule) -> Notes:
    """Rotate queries and keys (after normalizing them, if the model does) and write the cache in
    one op.

    Pairs of channels are halves or neighbors; all channels or only the first ones are rotated, of
    queries to latents the last ones. Casts around them are dropped. A norm is of each head, or of
    all heads of a token together.

    Before:
        q = rotary(llmc.rms_norm(q0), cos_table[positions], sin_table[positions])
        k = rotary(llmc.rms_norm(k0), cos_table[positions], sin_table[positions])
        llmc.write_kv(k, v, key_cache, value_cache, slot_mapping)
        o = llmc.paged_attention(q, ...)
    After:
        q = llmc.rope_write(q0, k0, v, q_norm, k_norm, eps, offset, cos_table, sin_table, positions,
                            interleaved, key_cache, value_cache, slot_mapping)
        o = llmc.paged_attention(q, ...)

    Before:
        q = aten.cat(q0[..., :D], rotary(q0[..., D:], cos, sin))
        k = aten.cat(llmc.rms_norm(c), rotary(r, cos, sin))
        llmc.write_kv(k, k[..., :0], key_cache, ...)
        o = llmc.latent_attention(q, w, key_cache, ...)
    After:
        q = llmc.rope_write_latent(q0, c, r, norm, eps, offset, cos_table, sin_table, positions,
                                   interleaved, key_cache, slot_mapping)
        o = llmc.latent_attention(q, w, key_cache, ...)
    """
    graph = gm.graph
    tables: dict[tuple[Any, ...], fx.Node] = {}
    notes = []
    for write in calls(graph, write_kv.overload):
        users = arguments(write).key_cache.users
        readers = [
            u for u in users if is_call(u, paged_attention.overload, latent_attention.overload)
        ]
        if not readers:  # this cache holds hidden states for a draft head
            continue
        latent = is_call(readers[0], latent_attention.overload)
        reason = (_fuse_latent if latent else _fuse)(graph, write, readers, tables)
        if reason:
            notes.append(f"{write.name}: {reason}")
    return notes


def _fuse(
    graph: fx.Graph,
    write: fx.Node,
    readers: list[fx.Node],
    tables: dict[tuple[Any, ...], fx.Node],
) -> str | None:
    """Rewrite one layer; return the reason if it does not match."""
    given, attend = arguments(write), readers[0]
    query_rope, key_rope = find_rotary(arguments(attend).query), find_rotary(given.key)
    if query_rope is None or key_rope is None:
        return _UNKNOWN
    if reason := _why_different(query_rope, key_rope, readers):
        return reason
    with graph.inserting_before(write):
        ropes = (query_rope, val(arguments(attend).query).dtype), (key_rope, val(given.key).dtype)
        norm_last = query_rope.norm is not None
        source = _rotated_first if norm_last else _source
        q, k = (source(graph, rope, dtype) for rope, dtype in ropes)
        if (q.weight is None) != (k.weight is None) or (q.eps, q.offset) != (k.eps, k.offset):
            q, k = (_Source(_flatten(graph, rope, dtype)) for rope, dtype in ropes)
        cos, sin = tables_of(graph, key_rope, tables)
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
            positions=_positions(graph),
            interleaved=query_rope.interleaved,
            key_cache=given.key_cache,
            value_cache=given.value_cache,
            slot_mapping=given.slot_mapping,
            norm_last=norm_last,
        )
    set_arguments(attend, query=fused)
    graph.erase_node(write)
    return None


def _why_different(query: Rotary, key: Rotary, readers: list[fx.Node]) -> str | None:
    """Why one op cannot rotate both, if it cannot."""
    if (query.cos, query.sin) != (key.cos, key.sin):
        return "query and key read different rotary tables"
    if query.kind != key.kind:
        return "query and key rotate differently"
    if key.moved and len(readers) > 1:
        return "other layers read keys whose channels the model reorders"
    norms = [arguments(rope.norm) for rope in (query, key) if rope.norm is not None]
    if norms:
        width = val(query.x).shape[-1]
        alike = len({(norm.eps, norm.offset) for norm in norms}) == 1 and len(norms) == 2
        whole = all(
            norm.weight is not None and val(norm.weight).shape[0] == width for norm in norms
        )
        if not (alike and whole) or key.moved:
            return "query and key are normalized after the rotation in no form that is known"
    return None


def _positions(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(n for n in graph.nodes if input_of(n) == StepInput(name="positions"))
    return found


def _fuse_latent(
    graph: fx.Graph,
    write: fx.Node,
    readers: list[fx.Node],
    tables: dict[tuple[Any, ...], fx.Node],
) -> str | None:
    """As `_fuse`, of a layer that attends to latents."""
    given, attend = arguments(write), readers[0]
    query, key = find_last_rotary(arguments(attend).query), find_last_rotary(given.key)
    if query is None or key is None:
        return _UNKNOWN
    (first, query_rope), (source, key_rope) = query, key
    if reason := _why_different(query_rope, key_rope, readers):
        return reason
    dtype = val(given.key).dtype
    tokens, _, width = val(given.key).shape
    shared = key_rope.x
    rank = width - val(shared).shape[-1]
    dtypes = {val(part).dtype for part in (arguments(attend).query, source, shared)}
    if dtypes != {dtype}:
        return "parts of the key have different dtypes"
    with graph.inserting_before(write):
        latent = _normed(source, rank) or _Source(source)
        cos, sin = tables_of(graph, key_rope, tables)
        whole = replace(query_rope, x=_whole(graph, first, query_rope.x))
        fused = emit(
            graph,
            rope_write_latent.overload,
            query=_flatten(graph, whole, dtype),
            latent=reshaped(graph, latent.node, [tokens, rank]),
            shared=reshaped(graph, shared, [tokens, width - rank]),
            latent_norm=latent.weight,
            eps=latent.eps,
            norm_offset=latent.offset,
            cos_table=cos,
            sin_table=sin,
            positions=_positions(graph),
            interleaved=key_rope.interleaved,
            key_cache=given.key_cache,
            slot_mapping=given.slot_mapping,
            k_scale=given.k_scale,
        )
    set_arguments(attend, query=fused)
    graph.erase_node(write)
    return None


def _whole(graph: fx.Graph, first: fx.Node, last: fx.Node) -> fx.Node:
    """Two parts of each head's channels as one value, [1, H, T, D] or [1, T, H, D]."""
    if is_call(first, operator.getitem) and is_call(last, operator.getitem):
        split = arguments(first).source
        ends = split is arguments(last).source and is_call(split, aten.split_with_sizes.default)
        if ends and (arguments(first).index, arguments(last).index) == (0, 1):
            cut = arguments(split)
            if len(cut.split_sizes) == 2 and cut.dim in (-1, val(first).dim() - 1):
                whole: fx.Node = cut.self
                return whole
    return emit(graph, aten.cat.default, [first, last], -1)


def _normed(latent: fx.Node, rank: int) -> _Source | None:
    """What a latent's norm reads, if nothing else reads the normalized value."""
    while keeps_order(latent) and only_user(latent) is not None:
        latent = latent.args[0]  # type: ignore[assignment]
    if not is_call(latent, rms_norm.overload) or only_user(latent) is None:
        return None
    norm = arguments(latent)
    if norm.weight is None or val(norm.weight).shape[0] != rank or val(norm.x).shape[-1] != rank:
        return None
    return _Source(norm.x, norm.weight, norm.eps, norm.offset)


def _flatten(graph: fx.Graph, rope: Rotary, dtype: torch.dtype) -> fx.Node:
    """[1, H, T, D] or [1, T, H, D] -> [T, H, D] in `dtype`, the dtype of the rotated result."""
    x = rope.x
    if rope.heads_last:
        source: Any = x
    else:
        source = swapped(x, 1, 2) or emit(graph, aten.transpose.int, x, 1, 2)
    flat = emit(graph, aten.squeeze.dim, source, 0)
    return flat if val(flat).dtype == dtype else emit(graph, aten.to.dtype, flat, dtype)


def _rotated_first(graph: fx.Graph, rope: Rotary, dtype: torch.dtype) -> _Source:
    """The value before the rotation, and the norm after it."""
    norm = arguments(rope.norm)  # type: ignore[arg-type]
    return _Source(_flatten(graph, rope, dtype), norm.weight, norm.eps, norm.offset)


def _source(graph: fx.Graph, rope: Rotary, dtype: torch.dtype) -> _Source:
    """The value before the norm, if nothing else reads the normalized value."""
    x = rope.x
    heads_last = rope.heads_last
    normed: Any = x
    if not heads_last and is_call(x, aten.transpose.int):
        normed, heads_last = arguments(x).self, True
    if is_call(normed, rms_norm.overload) and (normed is x or only_user(normed) is x):
        norm = arguments(normed)
        is_whole = norm.weight is not None and val(norm.weight).shape[0] == val(x).shape[-1]
        if is_whole and val(x).dtype == dtype:
            flat = _flatten(graph, replace(rope, x=norm.x, heads_last=heads_last), dtype)
            return _Source(flat, norm.weight, norm.eps, norm.offset)
    together = _norm_of_all_heads(normed, x) if heads_last else None
    if together is not None and val(x).dtype == dtype:
        norm = arguments(together)
        heads = reshaped(graph, norm.x, val(normed).shape)
        flat = _flatten(graph, replace(rope, x=heads, heads_last=True), dtype)
        return _Source(flat, norm.weight, norm.eps, norm.offset)
    return _Source(_flatten(graph, rope, dtype))


def _norm_of_all_heads(heads: fx.Node, rotated: fx.Node) -> fx.Node | None:
    """The norm of whose result `heads`, [1, T, H, D], is a view, if nothing reads either of them
    but `rotated`, which is `heads` or its transpose."""
    if not keeps_order(heads) or not (heads is rotated or only_user(heads) is rotated):
        return None
    norm: fx.Node = heads.args[0]  # type: ignore[assignment]
    if not is_call(norm, rms_norm.overload) or only_user(norm) is not heads:
        return None
    given, width = arguments(norm), math.prod(val(heads).shape[2:])
    is_whole = given.weight is not None and val(given.weight).shape[0] == width
    return norm if is_whole and val(norm).shape[-1] == width else None
