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
    widths = [_width(node) for node in layer_outputs(graph)]
    return [torch.zeros(num_tokens, width, dtype=dtype, device=device) for width in widths]


def _width(hidden: fx.Node) -> int:
    """N of a hidden state [1, T, N]; CompileError if it has another shape."""
    shape = val(hidden).shape
    if len(shape) != 3 or str(shape[0]) != "1":
        raise CompileError(f"the hidden state {hidden.name} has an unusual shape {list(shape)}")
    return int(shape[2])


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
        width, captured = _width(hidden), buffer.shape[1]
        if width != captured:
            raise CompileError(
                f"the hidden state {hidden.name} has {width} channels after the first passes, "
                f"and {captured} in the captured graph"
            )
        copy_out(hidden, buffer, f"tap_{layer}")
    return []
