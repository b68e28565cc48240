"""A pass used only by the checker: runs sparse indexers as they were captured."""

from __future__ import annotations

from torch import fx

from llmc.kernels.attention import attention
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, set_arguments, val
from llmc.passes.find_indexers import CAUSAL
from llmc.passes.inputs import StepInput, input_of


@graph_pass(cached=False)
def show_masks(gm: fx.GraphModule) -> Notes:
    """Compute the causal masks that a model's own code reads, to choose keys by their scores.

    It runs last: the shapes of what is computed from a marker are not updated.

    Before:
        m [0, 1, 1, 1] = aten.empty(...)
        i = aten.topk(scores, masked with m [0, T, T], n)[1]
        y = llmc.attention(..., chosen=i)
    After:
        m [1, 1, T, T] = whether the key is the query's token or an earlier one
        i = aten.topk(scores, masked with m [1, T, T], n)[1]
        y = llmc.attention(..., chosen=aten.transpose(i, 0, 1))
    """
    graph = gm.graph
    tokens = next(n for n in graph.nodes if input_of(n) == StepInput(name="token_ids"))
    markers = [n for n in calls(graph, aten.empty.memory_format) if tuple(val(n).shape) == CAUSAL]
    for node in markers:
        with graph.inserting_before(node):
            key = emit(graph, aten.cumsum.default, emit(graph, aten.ones_like.default, tokens), 0)
            mask = emit(graph, aten.le.Tensor, key, emit(graph, aten.unsqueeze.default, key, 1))
            mask = emit(graph, aten.unsqueeze.default, mask, 0)
            node.replace_all_uses_with(emit(graph, aten.unsqueeze.default, mask, 0))
        graph.erase_node(node)
    for node in calls(graph, attention.overload) if markers else []:
        chosen = arguments(node).chosen
        if chosen is not None and arguments(node).sparse_block_size == 1:
            with graph.inserting_before(node):
                set_arguments(node, chosen=emit(graph, aten.transpose.int, chosen, 0, 1))
    return []
