"""`attend_whole_images`: image tokens attend to all of their image, where the model does so."""

from __future__ import annotations

from torch import fx

from llmc.errors import CompileError
from llmc.kernels.image_attention import image_attention
from llmc.kernels.paged_attention import paged_attention
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, calls, emit, val
from llmc.passes.inputs import step_input
from llmc.passes.options import Where


@graph_pass(required=True)
def attend_whole_images(gm: fx.GraphModule, *, where: Where) -> Notes:
    """Recompute the attention of image tokens, including the later tokens of their image.

    Before:
        o = llmc.paged_attention(q, ...)
    After:
        c = llmc.paged_attention(q, ...)
        o = llmc.image_attention(c, q, ..., attended_span [2, T])
    """
    if where == "none":
        return []
    graph = gm.graph
    same = ("query", "key_cache", "value_cache", "query_start", "context_len", "block_table")
    how = ("scale", "window", "softcap", "sinks", "k_scale", "v_scale")
    for node in calls(graph, paged_attention.overload):
        given = arguments(node)
        if any(user.target == image_attention.overload for user in node.users):
            continue
        if where == "windowed" and not given.window:
            continue
        has_own_sinks = given.sinks is not None and val(given.sinks).dim() == 2
        if given.distance_bias is not None or has_own_sinks:
            raise CompileError(
                f"{node.name} adds a per-token position bias or per-token sinks, with which llmc "
                "does not support attention to whole images"
            )
        span, users = step_input(graph, "attended_span"), list(node.users)
        with graph.inserting_after(node):
            seen = emit(
                graph,
                image_attention.overload,
                causal=node,
                attended_span=span,
                **{name: getattr(given, name) for name in (*same, *how)},
            )
        for user in users:
            user.replace_input_with(node, seen)
    return []
