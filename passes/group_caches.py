"""`group_caches`: a block table for each attention window, all over one pool of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from llmc.kernels.latent_attention import latent_attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.rope_attention import rope_attention
from llmc.kernels.rope_latent_attention import rope_latent_attention
from llmc.kernels.step_inputs import GROUPED, of_group
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, calls, val
from llmc.passes.inputs import CacheInput, StepInput, input_of, step_input

MAX_GROUPS = 8  # every row has a block table for each group


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table. A window or chunk of 0 means none, as in `visible`."""

    window: int
    chunk: int
    num_layers: int


@graph_pass()
def group_caches(gm: fx.GraphModule, *, max_positions: int) -> Notes:
    """Let sliding-window layers free blocks that have left their window, for any layer to use.

    Layers with the same window form groups of the same size. The first layers of all groups share
    one cache, the second layers share another, and so on: a block belongs to one group at a time,
    whose block table lists it. A window or chunk of `max_positions` tokens or more counts as none.

    Before:
        llmc.write_kv(k0, v0, key_cache_0, value_cache_0, slot_mapping)
        o0 = llmc.paged_attention(q0, key_cache_0, value_cache_0, ..., block_table, window=0)
        llmc.write_kv(k1, v1, key_cache_1, value_cache_1, slot_mapping)
        o1 = llmc.paged_attention(q1, key_cache_1, value_cache_1, ..., block_table, window=512)
    After:
        llmc.write_kv(k0, v0, key_cache_0, value_cache_0, slot_mapping)
        o0 = llmc.paged_attention(q0, key_cache_0, value_cache_0, ..., block_table, window=0)
        llmc.write_kv(k1, v1, key_cache_0, value_cache_0, slot_mapping_1)
        o1 = llmc.paged_attention(q1, key_cache_0, value_cache_0, ..., block_table_1, window=512)
    """
    graph = gm.graph
    if any(role == StepInput(name=of_group(GROUPED[0], 1)) for role in _roles(graph)):
        return ["grouped already"]
    kinds = _layers_by_window(graph, max_positions)
    if len(kinds) < 2:
        return [] if len(kinds) == 0 else ["all layers have the same attention window"]
    layers = _caches(graph)
    shapes = {_shape(parts) for parts in layers.values()}
    if len(shapes) > 1:
        return [f"caches of {len(shapes)} shapes can't share blocks"]
    size = group_size([len(kind) for kind in kinds.values()])
    groups = [
        (window, kind[first : first + size])
        for window, kind in kinds.items()
        for first in range(0, len(kind), size)
    ]
    if len(groups) > MAX_GROUPS:
        return [f"layers with {len(kinds)} different windows would need too many groups"]
    _share(graph, layers, [members for _, members in groups])
    return [f"a separate block table for layers that see {_words(*window)}" for window in kinds]


def group_size(counts: Sequence[int]) -> int:
    """The number of layers per group, given the number of layers of each kind, widest window first.

    A block holds all layers of a group, so groups that are not full waste memory. The first kind
    matters most, since it holds the most blocks.
    """

    def cost(size: int) -> tuple[bool, int, int, int]:
        num = sum(-(-count // size) for count in counts)
        return num > MAX_GROUPS, -counts[0] % size, num * size - sum(counts), num

    return min(range(1, max(counts) + 1), key=cost)


def cache_groups(graph: fx.Graph) -> tuple[CacheGroup, ...]:
    """The groups of a rewritten graph, by the block tables that its attention reads."""
    names = [role.name for role in _roles(graph) if isinstance(role, StepInput)]
    groups: list[CacheGroup] = []
    while (table := of_group("block_table", len(groups))) in names:
        readers = [
            node
            for node in graph.nodes
            if is_attention(node) and input_of(arguments(node).block_table) == StepInput(name=table)
        ]
        caches = {arguments(node).key_cache for node in readers}
        window, chunk = widest([_limits(node) for node in readers])
        groups.append(CacheGroup(window=window, chunk=chunk, num_layers=len(caches)))
    return tuple(groups)


def is_attention(node: fx.Node) -> bool:
    """Whether a call reads a paged cache, whichever implementation of the op it calls."""
    ops = (paged_attention, rope_attention, latent_attention, rope_latent_attention)
    return any(op.name in str(node.target) for op in ops)


def _limits(attention: fx.Node) -> tuple[int, int]:
    """The call's window and chunk."""
    given = arguments(attention)
    return int(given.window), int(given.chunk)


def _roles(graph: fx.Graph) -> list[object]:
    return [input_of(node) for node in graph.nodes if node.op == "placeholder"]


def _caches(graph: fx.Graph) -> dict[int, dict[str, fx.Node]]:
    """The placeholders of each layer, by part."""
    layers: dict[int, dict[str, fx.Node]] = {}
    for node in graph.nodes:
        role = input_of(node)
        if isinstance(role, CacheInput):
            layers.setdefault(role.layer, {})[role.part] = node
    return layers


def _shape(parts: dict[str, fx.Node]) -> tuple[object, ...]:
    return tuple((*val(parts[p]).shape[1:], val(parts[p]).dtype) for p in sorted(parts))


def _layers_by_window(graph: fx.Graph, max_positions: int) -> dict[tuple[int, int], list[int]]:
    """Cache layers by the (window, chunk) of their attention; the widest first."""
    limits: dict[int, list[tuple[int, int]]] = {}
    for node in calls(graph, paged_attention.overload, latent_attention.overload):
        role = input_of(arguments(node).key_cache)
        assert isinstance(role, CacheInput)
        window, chunk = (n if n < max_positions else 0 for n in _limits(node))
        limits.setdefault(role.layer, []).append((window, chunk))
    kinds: dict[tuple[int, int], list[int]] = {}
    for layer, seen in sorted(limits.items()):
        kinds.setdefault(widest(seen), []).append(layer)
    order = sorted(kinds, key=lambda kind: min([n for n in kind if n] or [2**31]), reverse=True)
    return {kind: kinds[kind] for kind in order}


def widest(limits: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The window and chunk that a cache with these readers must keep; 0 is no limit."""
    windows, chunks = zip(*limits, strict=True)
    return (max(windows) if all(windows) else 0, max(chunks) if all(chunks) else 0)


def _share(
    graph: fx.Graph, layers: dict[int, dict[str, fx.Node]], groups: Sequence[Sequence[int]]
) -> None:
    """Let the layers at the same index of all groups share the caches of the first such layer."""
    roles = ((input_of(node), node) for node in graph.nodes)
    inputs = {role.name: node for role, node in roles if isinstance(role, StepInput)}
    owners: dict[int, dict[str, fx.Node]] = {}  # index in the group -> its caches
    for number, members in enumerate(groups):
        tables = {
            inputs[name]: step_input(graph, of_group(name, number), val(inputs[name]))
            for name in GROUPED
        }
        for place, layer in enumerate(members):
            own = layers[layer]
            shared = owners.setdefault(place, own)
            for node in {user for part in own.values() for user in part.users}:
                for old, new in tables.items():
                    node.replace_input_with(old, new)
            for part, old in own.items():
                if old is not shared[part]:
                    old.replace_all_uses_with(shared[part])
    for place, parts in owners.items():
        for node in parts.values():
            node.meta["input"] = replace(node.meta["input"], layer=place)
    kept = {node for parts in owners.values() for node in parts.values()}
    for parts in layers.values():
        for node in parts.values():
            if node not in kept:
                graph.erase_node(node)


def _words(window: int, chunk: int) -> str:
    limits = [f"the last {window} tokens"] * bool(window) + [f"chunks of {chunk}"] * bool(chunk)
    return " and ".join(limits) or "the whole sequence"
