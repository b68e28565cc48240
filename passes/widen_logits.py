"""`widen_logits`: map a draft head's tokens to their ids in the target model."""

from __future__ import annotations

import torch
from torch import fx

from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, emit, val
from llmc.passes.inputs import WeightInput, add_constant, add_input, fake_like

ID_MAP = "d2t"  # the parameter's name: the offset from each id of the head to the model's


@graph_pass(required=True)
def widen_logits(gm: fx.GraphModule, *, vocab_size: int) -> Notes:
    """Return logits for all tokens of the model; those that the head does not know get -inf. So its
    sampling uses the same random numbers, masks and penalties as the model's.

    Before:
        return logits [S, D]
    After:
        ids [D] = d2t [D] + aten.arange(D)
        return aten.index_copy(aten.new_full(logits, [S, V], -inf), 1, ids, logits)
    """
    graph = gm.graph
    output = graph.output_node()
    logits = output.args[0]
    assert isinstance(logits, fx.Node)
    width = int(val(logits).shape[1])
    fake = fake_like(logits, width, dtype=torch.int64)
    offsets = add_input(graph, ID_MAP, WeightInput(parts=(ID_MAP,)), fake)
    own = add_constant(graph, "draft_ids", torch.arange(width), logits)
    with graph.inserting_before(output):
        ids = emit(graph, aten.add.Tensor, offsets, own)
        samples = emit(graph, aten.sym_size.int, logits, 0)
        none = emit(graph, aten.new_full.default, logits, [samples, vocab_size], float("-inf"))
        wide = emit(graph, aten.index_copy.default, none, 1, ids, logits)
    output.args = (wide,)
    return []
