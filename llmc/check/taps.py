"""A pass used only by the checker: copies the hidden state after each layer to a buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import val
from llmc.passes.layers import copy_out, layer_outputs


def tap_buffers(
    graph: fx.Graph, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """A buffer [tokens, N] per layer; CompileError if a layer's output is not [1, T, N]."""
    buffers = []
    for node in layer_outputs(graph):
        shape = val(node).shape
        if len(shape) != 3 or str(shape[0]) != "1":
            raise CompileError(f"the hidden state {node.name} has an unusual shape {list(shape)}")
        buffers.append(torch.zeros(num_tokens, int(shape[2]), dtype=dtype, device=device))
    return buffers


@graph_pass(cached=False)
def tap_layers(gm: fx.GraphModule, *, buffers: Sequence[Tensor]) -> Notes:
    """Copy the output of each layer.

    Before:
        h [1, T, N] = the output of a layer
    After:
        buffer[:T].copy_(h[0])

    Raises CompileError if earlier passes left another value between two layers: that of streams
    which are mixed there, for example.
    """
    outputs = layer_outputs(gm.graph)
    for layer, (hidden, buffer) in enumerate(zip(outputs, buffers, strict=True)):
        shape = val(hidden).shape
        if len(shape) != 3 or shape[2] != buffer.shape[1]:
            raise CompileError(
                f"the hidden state {hidden.name} has the shape {list(shape)}, which differs from "
                f"[1, tokens, {buffer.shape[1]}] in the captured graph"
            )
        copy_out(hidden, buffer, f"tap_{layer}")
    return []
