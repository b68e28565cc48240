"""`append_sampler`: penalties, masks and sampling become part of the graph."""

from __future__ import annotations

import torch
from torch import fx

from llmc.kernels.ban_words import ban_words
from llmc.kernels.process_logits import process_logits
from llmc.kernels.sample import sample
from llmc.kernels.step_inputs import BAD_WORD_TOKENS
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, emit, val
from llmc.passes.inputs import step_input
from llmc.pooling import DRAFTED


@graph_pass(required=True)
def append_sampler(gm: fx.GraphModule, *, is_head: bool = False) -> Notes:
    """Sample inside the graph, each logits row with the parameters in its request's table row.

    A draft head's rows are one token behind those of its target model. It samples with the random
    numbers that the target model will use, and its tokens are marked as drafted.

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
    sizes = {"S": val(logits).shape[0]}
    row, length = (step_input(graph, name, sizes=sizes) for name in ("row", "length"))

    def table(name: str) -> fx.Node:
        return step_input(graph, name)

    def by_sample(name: str) -> fx.Node:
        return emit(graph, aten.index_select.default, table(name), 0, row)

    with graph.inserting_before(output):
        processed = emit(
            graph,
            process_logits.overload,
            logits=logits,
            row=row,
            length=length,
            history=table("history"),
            prompt_len=table("prompt_len"),
            repetition=table("repetition_penalty"),
            presence=table("presence_penalty"),
            frequency=table("frequency_penalty"),
            repeat_last_n=table("repeat_last_n"),
            bias_token=table("bias_token"),
            bias_value=table("bias_value"),
            bias_until=table("bias_until"),
            has_mask=table("has_mask"),
            mask=table("mask"),
        )
        emit(
            graph,
            ban_words.overload,
            logits=processed,
            row=row,
            length=length,
            history=table("history"),
            prompt_len=table("prompt_len"),
            words=table("bad_words"),
            places=BAD_WORD_TOKENS,
        )
        position = emit(graph, aten.to.dtype, length, torch.int64)
        if is_head:
            position = emit(graph, aten.add.Scalar, position, 1)
        token = emit(
            graph,
            sample.overload,
            logits=processed,
            temperature=by_sample("temperature"),
            top_k=by_sample("top_k"),
            top_p=by_sample("top_p"),
            min_p=by_sample("min_p"),
            seed=by_sample("seed"),
            position=position,
        )
        if is_head:  # leave -1 (no token) unmarked
            is_token = emit(graph, aten.ge.Scalar, token, 0)
            marked = emit(graph, aten.add.Scalar, token, DRAFTED)
            token = emit(graph, aten.where.self, is_token, marked, token)
    output.args = ((token, logits),)
    return []
