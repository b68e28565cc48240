"""`append_sampler`: penalties, masks and the draw become part of the graph."""

from __future__ import annotations

import torch
from torch import fx

from llmc.kernels.ban_words import ban_words
from llmc.kernels.process_logits import process_logits
from llmc.kernels.sample import sample
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, emit, val
from llmc.passes.inputs import fake_like, step_input

BAD_WORD_TOKENS = 16  # places of a word in the table `bad_words`

# The sampling tables, one row a request: name, columns (0: none), dtype. The runner owns them.
TABLES: dict[str, tuple[int, torch.dtype]] = {
    "history": (2, torch.int32),
    "prompt_len": (0, torch.int32),
    "repetition_penalty": (0, torch.float32),
    "presence_penalty": (0, torch.float32),
    "frequency_penalty": (0, torch.float32),
    "bias_token": (2, torch.int32),
    "bias_value": (2, torch.float32),
    "bias_until": (2, torch.int32),
    "has_mask": (0, torch.int32),
    "mask": (2, torch.int32),
    "bad_words": (2, torch.int32),
}
# What a row holds that asks for nothing; 0 where nothing is said.
NEUTRAL = {"repetition_penalty": 1.0, "top_p": 1.0, "bias_token": -1, "bad_words": -1}
PER_ROW = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
}


@graph_pass(required=True)
def append_sampler(gm: fx.GraphModule) -> Notes:
    """Sample inside the graph, each logits row with the parameters of its request's table row.

    Before:
        return logits [S, V]
    After:
        processed = llmc.process_logits(logits, row [S], length [S], history, penalties, masks ...)
        llmc.ban_words(processed, row, length, history, bad_words ...)
        next_token [S] = llmc.sample(processed, temperature[row], ..., seed[row], length)
        return next_token, logits
    """
    graph = gm.graph
    output = graph.output_node()
    logits = output.args[0]
    assert isinstance(logits, fx.Node)
    rows = val(logits).shape[0]
    row = step_input(graph, "row", fake_like(logits, rows, dtype=torch.int64))
    length = step_input(graph, "length", fake_like(logits, rows, dtype=torch.int32))
    tables = {
        name: step_input(
            graph, name, fake_like(logits, *((4, columns) if columns else (4,)), dtype=dtype)
        )
        for name, (columns, dtype) in TABLES.items()
    }
    bad_words = tables.pop("bad_words")
    with graph.inserting_before(output):
        processed = emit(graph, process_logits.overload, logits, row, length, *tables.values())
        said = (row, length, tables["history"], tables["prompt_len"])
        emit(graph, ban_words.overload, processed, *said, bad_words, BAD_WORD_TOKENS)
        picked = []
        for name, dtype in PER_ROW.items():
            table = step_input(graph, name, fake_like(logits, 4, dtype=dtype))
            picked.append(emit(graph, aten.index_select.default, table, 0, row))
        position = emit(graph, aten.to.dtype, length, torch.int64)
        token = emit(graph, sample.overload, processed, *picked, position)
    output.args = ((token, logits),)
    return []
