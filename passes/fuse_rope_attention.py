"""`fuse_rope_attention`: what writes a cache and the attention that reads it become one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmc.kernels.latent_attention import latent_attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.registry import Op
from llmc.kernels.rms_norm import rms_norm
from llmc.kernels.rope_attention import rope_attention
from llmc.kernels.rope_latent_attention import rope_latent_attention
from llmc.kernels.rope_write import rope_write
from llmc.kernels.rope_write_latent import rope_write_latent
from llmc.kernels.step_inputs import of_group
from llmc.kernels.write_kv import write_kv
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    is_call,
    positional,
    replace,
    through,
    val,
)
from llmc.passes.group_caches import MAX_GROUPS
from llmc.passes.inputs import StepInput, add_constant, input_of, step_input

_FUSED = {  # by the ops that write and read
    (rope_write.overload, paged_attention.overload): rope_attention,
    (rope_write_latent.overload, latent_attention.overload): rope_latent_attention,
}
_WRITES = {write_kv.overload, *(write for write, _ in _FUSED)}
_SAME = ("key_cache", "value_cache", "k_scale", "v_scale")
_UNUSED = {"chosen": None, "v_dim": 0, "distance_bias": None}


@graph_pass()
def fuse_rope_attention(
    gm: fx.GraphModule, *, max_positions: int, unwanted: str | None = None
) -> Notes:
    """Launch one kernel less in every layer of a decode step. The op itself handles few and many
    tokens differently.

    Before:
        q = llmc.rope_write(q0, k0, v, ..., interleaved, key_cache, value_cache, slot_mapping)
        o = llmc.paged_attention(q, key_cache, value_cache, query_start, ..., slopes)
    After:
        o = llmc.rope_attention(q0, k0, v, ..., interleaved, key_cache, value_cache, slot_mapping,
                                query_start, ..., slopes)

    `rope_write_latent` and `latent_attention` become `rope_latent_attention` in the same way, and
    `write_kv` and `paged_attention`, of layers without a rotary embedding, become `rope_attention`
    with tables [max_positions, 0], which rotate no channel, and with the norms of queries and keys.
    """
    if unwanted is not None:
        return [unwanted]
    notes = []
    no_rotation: fx.Node | None = None
    for attend in calls(gm.graph, paged_attention.overload, latent_attention.overload):
        write: Any = arguments(attend).query
        op = _FUSED.get((write.target, attend.target))
        if op is None:
            write = _plain_write(attend)
            if write is None:
                continue
        reason = _obstacle(write, attend)
        if reason is not None:
            notes.append(f"{attend.name}: {reason}")
        elif op is not None:
            _fuse(gm.graph, write, attend, op, {})
        else:
            if no_rotation is None:
                table = torch.empty(max_positions, 0)
                no_rotation = add_constant(gm.graph, "no_rotation", table, attend)
            others = _unrotated(gm.graph, write, attend, no_rotation)
            _fuse(gm.graph, write, attend, rope_attention, others)
    return notes


def _plain_write(attend: fx.Node) -> fx.Node | None:
    """The call of write_kv that fills the cache, if nothing else writes to it."""
    writes = [u for u in arguments(attend).key_cache.users if u.target in _WRITES]
    is_plain = [write.target for write in writes] == [write_kv.overload]
    return writes[0] if is_plain and is_call(attend, paged_attention.overload) else None


def _unrotated(graph: fx.Graph, write: fx.Node, attend: fx.Node, table: fx.Node) -> dict[str, Any]:
    """The arguments of `rope_write` that `write_kv` does not have, or has after norms of heads."""
    query, key = arguments(attend).query, arguments(write).key
    norms = [arguments(norm) for norm in (_norm_of(query), _norm_of(key)) if norm is not None]
    taken: dict[str, Any] = {
        **dict.fromkeys(("query_norm", "key_norm")),
        **dict.fromkeys(("eps", "norm_offset"), 0.0),
    }
    if len(norms) == 2 and len({(norm.eps, norm.offset) for norm in norms}) == 1:
        of_query, of_key = norms
        with graph.inserting_before(attend):
            query, key = _moved(graph, query, of_query.x), _moved(graph, key, of_key.x)
        taken = {
            "query_norm": of_query.weight, "key_norm": of_key.weight, "eps": of_key.eps,
            "norm_offset": of_key.offset,
        }  # fmt: skip
    return {
        **taken,
        "query": query,
        "key": key,
        **dict.fromkeys(("cos_table", "sin_table"), table),
        "positions": step_input(graph, "positions"),
        **dict.fromkeys(("interleaved", "norm_last"), False),
    }


_MOVES = (aten.squeeze.dim, aten.transpose.int)


def _norm_of(heads: fx.Node) -> fx.Node | None:
    """The norm of each of the heads [T, H, D], if they are its result."""
    norm = through(heads, *_MOVES)
    if not is_call(norm, rms_norm.overload):
        return None
    weight, width = arguments(norm).weight, val(heads).shape[-1]
    is_per_head = weight is not None and val(weight).shape[0] == val(norm).shape[-1] == width
    return norm if is_per_head else None


def _moved(graph: fx.Graph, like: fx.Node, x: fx.Node) -> fx.Node:
    """x after the moves that lead from a norm to `like`."""
    if not is_call(like, *_MOVES):
        return x
    source, *how = positional(like)
    return emit(graph, like.target, _moved(graph, source, x), *how)


def _obstacle(write: fx.Node, attend: fx.Node) -> str | None:
    """Why the two calls can't be merged, or None."""
    written, given = arguments(write), arguments(attend)
    if any(user is not attend for user in write.users):
        return "the rotated query is read elsewhere"
    both = vars(written).keys() & set(_SAME)
    if any(getattr(written, name) is not getattr(given, name) for name in both):
        return "it reads other caches than those that were written"
    if not _same_blocks(written.slot_mapping, given.block_table):
        return "the blocks that it reads are not those that were written"
    if any(getattr(given, name, value) != value for name, value in _UNUSED.items()):
        return "it attends to chosen keys, to latents or with a bias"
    readers = {user for name in both if "cache" in name for user in getattr(given, name).users}
    node = write.next
    while node is not attend:
        if node in readers:
            return "the cache is read before it"
        node = node.next
    return None


def _same_blocks(slots: Any, table: Any) -> bool:
    """Whether both are step inputs of one group of layers."""
    pairs = ((of_group("slot_mapping", n), of_group("block_table", n)) for n in range(MAX_GROUPS))
    found = (input_of(slots), input_of(table))
    return found in [(StepInput(name=slot), StepInput(name=block)) for slot, block in pairs]


def _fuse(graph: fx.Graph, write: fx.Node, attend: fx.Node, op: Op, others: dict[str, Any]) -> None:
    given = {**vars(arguments(attend)), **vars(arguments(write)), **others}
    with graph.inserting_before(attend):
        fused = emit(graph, op.overload, **{name: given[name] for name in op.defaults})
    replace(attend, fused)
    graph.erase_node(write)
