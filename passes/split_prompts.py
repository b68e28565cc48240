"""`split_prompts`: pass attention a list of the prompts, which it computes in a different way."""

from __future__ import annotations

from torch import fx

from llmc.kernels.latent_attention import latent_attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.prompts import fits_flash
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, calls, positional, set_arguments
from llmc.passes.inputs import step_input


@graph_pass()
def split_prompts(gm: fx.GraphModule, *, unwanted: str | None = None) -> Notes:
    """Send new prompts to torch's FlashAttention if it computes the same attention.

    Latent attention without a window gets all long prompts, which it computes in expanded form.

    Before:
        o = llmc.paged_attention(q, key_cache, value_cache, ..., scale, 0, 0, 0.0, None, None)
    After:
        o = llmc.paged_attention(q, key_cache, value_cache, ..., scale, 0, 0, 0.0, None, None,
                                 None, None, prompts)
    and of latents:
        o = llmc.latent_attention(q, w, key_cache, ..., scale, 0, 0, ..., None, long_prompts)
    """
    if unwanted is not None:
        return [unwanted]
    for node in calls(gm.graph, latent_attention.overload):
        given = arguments(node)
        if given.prompts is None and given.window == given.chunk == 0:
            set_arguments(node, prompts=step_input(gm.graph, "long_prompts"))
    left = 0
    for node in calls(gm.graph, paged_attention.overload):
        if arguments(node).prompts is not None:
            continue
        values = fx.node.map_arg(positional(node), lambda n: n.meta["val"])
        if fits_flash(**paged_attention.bind(values)):
            set_arguments(node, prompts=step_input(gm.graph, "prompts"))
        else:
            left += 1
    reason = "FlashAttention needs plain causal attention in 16 bits, heads of 8 to 256 channels"
    return [f"{left} layers: {reason}"] if left else []
