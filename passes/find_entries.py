"""`find_entries`: attention to the keys of tokens and to entries behind them becomes one marker."""

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
    """Attention whose keys are those of the tokens, then the entries that end with them.

    CompileError where it is anything but that within a window.

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
        parts = entries_behind(given.key)
        if parts is None:
            continue
        key, found = parts
        is_plain = given.causal and not given.chunk and given.slopes is None and given.bias is None
        if given.key is not given.value or not is_plain or given.chosen is not None:
            raise CompileError(
                f"{marker.name} attends to entries that stand for several tokens, with values of "
                "their own, chunks or a position bias, which llmc does not know"
            )
        if not given.window or val(key).shape[1] != 1:
            raise CompileError(
                f"{marker.name} attends to entries that stand for several tokens beside all tokens "
                f"(window {given.window}), or with {val(key).shape[1]} KV heads; llmc knows such "
                "attention beside a window of tokens, with one KV head"
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


def entries_behind(key: Any) -> tuple[fx.Node, fx.Node] | None:
    """The keys of the tokens, and the call of `entries`, where keys are these two end to end."""
    if not is_call(key, aten.cat.default):
        return None
    given = arguments(key)
    if len(given.tensors) != 2 or given.dim not in (2, -2):
        return None
    found = through(given.tensors[1], aten.unsqueeze.default)
    return (given.tensors[0], found) if is_call(found, entries.overload) else None
