"""`find_entries`: attention to token keys followed by compressed entries becomes one marker."""

from __future__ import annotations

from typing import Any

from torch import fx

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.kernels.entries import entries, entry_attention
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, replace, through, val


@graph_pass(required=True)
def find_entries(gm: fx.GraphModule) -> Notes:
    """Match attention whose keys are those of the tokens, followed by entries that stand for
    several tokens.

    Raises CompileError for any such attention but one with a window and one KV head.

    Before:
        e = llmc.entries(entry [T, D], ..., rate, top_k)
        kv = aten.cat([k [1, 1, T, D], aten.unsqueeze(e)], 2)
        o = llmc.attention(q [1, H, T, D], kv, kv, key_cache, value_cache, scale, window, ...)
    After:
        o = llmc.entry_attention(q, k, entry, ..., key_cache, value_cache, scale, window, ...)
    """
    graph = gm.graph
    for marker in calls(graph, attention.overload):
        given = arguments(marker)
        parts = split_entries(given.key)
        if parts is None:
            continue
        key, found = parts
        is_plain = given.causal and not given.chunk and given.slopes is None and given.bias is None
        if given.key is not given.value or not is_plain or given.chosen is not None:
            raise CompileError(
                f"{marker.name} attends to entries that stand for several tokens, with separate "
                "values, chunks or a position bias, which llmc does not support"
            )
        if not given.window or val(key).shape[1] != 1:
            raise CompileError(
                f"{marker.name} attends to entries that stand for several tokens, with a window of "
                f"{given.window} tokens (0: all) and {val(key).shape[1]} KV heads; llmc supports "
                "such attention only with a window and one KV head"
            )
        names = ("query", "key_cache", "value_cache", "scale", "window", "softcap", "sinks")
        with graph.inserting_before(marker):
            made = emit(
                graph,
                entry_attention.overload,
                key=key,
                **vars(arguments(found)),
                **{name: getattr(given, name) for name in names},
            )
        replace(marker, made)
    return []


def split_entries(key: Any) -> tuple[fx.Node, fx.Node] | None:
    """(keys of the tokens, call of `entries`) if `key` is the concatenation of these two."""
    if not is_call(key, aten.cat.default):
        return None
    given = arguments(key)
    if len(given.tensors) != 2 or given.dim not in (2, -2):
        return None
    found = through(given.tensors[1], aten.unsqueeze.default)
    return (given.tensors[0], found) if is_call(found, entries.overload) else None
