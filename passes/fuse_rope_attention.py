"""`fuse_rope_attention`: the rotation that writes a cache and its attention become one op."""

from __future__ import annotations

from typing import Any

from torch import fx

from llmc.kernels.latent_attention import latent_attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.registry import Op
from llmc.kernels.rope_attention import rope_attention
from llmc.kernels.rope_latent_attention import rope_latent_attention
from llmc.kernels.rope_write import rope_write
from llmc.kernels.rope_write_latent import rope_write_latent
from llmc.kernels.step_inputs import of_group
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, calls, emit, only_user, replace
from llmc.passes.group_caches import MAX_GROUPS
from llmc.passes.inputs import StepInput, input_of

_FUSED = {  # by the ops that write and read
    (rope_write.overload, paged_attention.overload): rope_attention,
    (rope_write_latent.overload, latent_attention.overload): rope_latent_attention,
}
_SAME = ("key_cache", "value_cache", "k_scale", "v_scale")
_UNUSED = {"chosen": None, "v_dim": 0, "distance_bias": None}  # by layers with a rotary embedding


@graph_pass()
def fuse_rope_attention(gm: fx.GraphModule, *, unwanted: str | None = None) -> Notes:
    """Launch one kernel less in every layer of a decode step. The op itself handles few and many
    tokens differently.

    Before:
        q = llmc.rope_write(q0, k0, v, ..., interleaved, key_cache, value_cache, slot_mapping)
        o = llmc.paged_attention(q, key_cache, value_cache, query_start, ..., slopes)
    After:
        o = llmc.rope_attention(q0, k0, v, ..., interleaved, key_cache, value_cache, slot_mapping,
                                query_start, ..., slopes)

    `rope_write_latent` and `latent_attention` become `rope_latent_attention` in the same way.
    """
    if unwanted is not None:
        return [unwanted]
    notes = []
    for attend in calls(gm.graph, paged_attention.overload, latent_attention.overload):
        write: Any = arguments(attend).query
        op = _FUSED.get((write.target, attend.target))
        if op is None:
            continue
        reason = _obstacle(write, attend)
        if reason is None:
            _fuse(gm.graph, write, attend, op)
        else:
            notes.append(f"{attend.name}: {reason}")
    return notes


def _obstacle(write: fx.Node, attend: fx.Node) -> str | None:
    """Why the two calls can't be merged, or None."""
    written, given = arguments(write), arguments(attend)
    if only_user(write) is not attend:
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


def _fuse(graph: fx.Graph, write: fx.Node, attend: fx.Node, op: Op) -> None:
    given = {**vars(arguments(attend)), **vars(arguments(write))}
    with graph.inserting_before(attend):
        fused = emit(graph, op.overload, **{name: given[name] for name in op.defaults})
    replace(attend, fused)
    graph.erase_node(write)
