"""`fuse_sampler`: penalties, masks, banned words and sampling in one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmc.kernels.ban_words import ban_words
from llmc.kernels.process_logits import process_logits
from llmc.kernels.sample import sample
from llmc.kernels.sample_rows import sample_rows
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, replace

_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "seed")


@graph_pass()
def fuse_sampler(gm: fx.GraphModule) -> Notes:
    """Take two kernels from the logits to the tokens on a GPU, and one call on a CPU, which copies
    only the logits of rows with penalties, masks or banned words.

    Before:
        processed = llmc.process_logits(logits, row, length, history, penalties, masks ...)
        llmc.ban_words(processed, row, length, history, prompt_len, words, places)
        token = llmc.sample(processed, temperature[row], ..., seed[row], length)
    After:
        token = llmc.sample_rows(logits, row, length, history, penalties, masks ..., words, places,
                                 temperature, ..., seed, 0)
    """
    for node in calls(gm.graph, sample.overload):
        _fuse(gm.graph, node)
    return []


def _fuse(graph: fx.Graph, token: fx.Node) -> None:
    given = arguments(token)
    processed = given.logits
    if not is_call(processed, process_logits.overload) or len(processed.users) != 2:
        return
    [ban] = [user for user in processed.users if user is not token]
    if not is_call(ban, ban_words.overload):
        return
    before, words = arguments(processed), arguments(ban)
    tables = {name: _table(getattr(given, name), before.row) for name in _PARAMETERS}
    ahead = _ahead(given.position, before.length)
    same = (words.row, words.length, words.history, words.prompt_len)
    if ahead is None or None in tables.values():
        return
    if same != (before.row, before.length, before.history, before.prompt_len):
        return
    with graph.inserting_before(token):
        fused = emit(
            graph,
            sample_rows.overload,
            **vars(before),
            words=words.words,
            places=words.places,
            **tables,
            ahead=ahead,
        )
    replace(token, fused)
    graph.erase_node(ban)


def _table(selected: Any, row: fx.Node) -> fx.Node | None:
    """The table of which the entries at `row` are selected."""
    if not is_call(selected, aten.index_select.default):
        return None
    given = arguments(selected)
    return given.self if given.dim == 0 and given.index is row else None


def _ahead(position: Any, length: fx.Node) -> int | None:
    """What is added to the lengths to get the positions."""
    added = 0
    if is_call(position, aten.add.Scalar):
        given = arguments(position)
        position, added = given.self, given.other
    if not is_call(position, aten.to.dtype) or position.meta["val"].dtype != torch.int64:
        return None
    return added if arguments(position).self is length else None
