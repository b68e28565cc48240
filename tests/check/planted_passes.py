"""Wrong passes, planted to see whether the certificate finds them."""

from __future__ import annotations

from torch import fx

from llmc.kernels.paged_attention import paged_attention
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, calls, insert_after
from llmc.passes.layers import layer_outputs


@graph_pass()
def wrong_scale(gm: fx.GraphModule) -> Notes:
    """Scale what leaves layer 1 by a thousandth too much.

    Before:
        h
    After:
        1.001 * h
    """
    insert_after(layer_outputs(gm.graph)[1], aten.mul.Tensor, 1.001)
    return []


@graph_pass(place="late")
def wrong_attention(gm: fx.GraphModule) -> Notes:
    """Scale the first layer's attention.

    Before:
        o
    After:
        1.01 * o
    """
    insert_after(calls(gm.graph, paged_attention.overload)[0], aten.mul.Tensor, 1.01)
    return []


@graph_pass(changes_model=True)
def louder(gm: fx.GraphModule) -> Notes:
    """Scale on purpose.

    Before:
        h
    After:
        2 * h
    """
    insert_after(layer_outputs(gm.graph)[0], aten.mul.Tensor, 2.0)
    return []
