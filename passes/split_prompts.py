"""`split_prompts`: attention is told which requests are prompts, where another kernel is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.prompts import Prompts, is_plain
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import calls, val
from llmc.passes.inputs import step_input

_PROMPTS = 14  # its place among the op's arguments


@graph_pass()
def split_prompts(
    gm: fx.GraphModule, *, head_dims: Sequence[int], unwanted: str | None = None
) -> Notes:
    """Prompts go to torch's flash or cuDNN attention where a benchmark found these faster.

    Which one follows from the step's prompts and a table (kernels/prompt_table.py). `head_dims`:
    the head sizes that it has such lines for, on this GPU.

    Before:
        o = llmc.paged_attention(q, key_cache, value_cache, ..., scale, 0, 0, 0.0, None, None)
    After:
        o = llmc.paged_attention(q, key_cache, value_cache, ..., scale, 0, 0, 0.0, None, None,
                                 None, None, prompts)
    """
    if unwanted is not None:
        return [unwanted]
    if not head_dims:
        return ["no other kernel was measured as faster on this GPU"]
    left: dict[str, int] = {}
    for node in calls(gm.graph, paged_attention.overload):
        if len(node.args) > _PROMPTS:
            continue  # told already
        args: list[Any] = [*node.args, *[None] * (_PROMPTS - len(node.args))]
        query, key_cache, value_cache = (val(arg) for arg in args[:3])
        if query.shape[2] not in head_dims:
            reason = f"heads of {int(query.shape[2])} were not measured as faster"
        elif not is_plain(query, key_cache, value_cache, *args[7:12]):
            reason = "other kernels take no windows, chunks, caps, sinks, slopes or 8-bit caches"
        else:
            prompts = step_input(gm.graph, "prompts", _fake(query))
            node.args = (*args, prompts)
            continue
        left[reason] = left.get(reason, 0) + 1
    return [f"{count} layers: {reason}" for reason, count in left.items()]


def _fake(like: Tensor) -> Tensor:
    """The words of one prompt, on the host, whatever the device of the step."""
    return like.new_empty(len(Prompts(lengths=((1, 1),)).words()), dtype=torch.int32, device="cpu")
