"""`round_activations`: linears of 4- and 8-bit integers multiply integers, not floats."""

from __future__ import annotations

from torch import fx

from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import EXACT_BITS, quantized_linear, takes_bits
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, calls, val


@graph_pass(rounds=True)
def round_activations(gm: fx.GraphModule, *, bits: int | None) -> Notes:
    """Let CPUs multiply the integers of a weight as they are: inputs are rounded to 16 bits,
    relative to the largest of 32, or, where `bits` is 8, to 8 bits that meet a weight of 4.
    docs/quantization.md has how far that is from float32.

    `bits`: None where something else is quicker; then nothing is done.

    Before:
        y = llmc.quantized_linear(x, w, scale, zero, b, minimum)
    After:
        y = llmc.quantized_linear(x, w, scale, zero, b, minimum, 16)
    and llmc.quantized_expert_linear in the same way.
    """
    if bits is None:
        return ["integers are not asked for, or nothing here is quicker by them"]
    left = 0
    for op in (quantized_linear, quantized_expert_linear):
        for node in calls(gm.graph, op.overload):
            given = arguments(node)
            own = takes_bits(val(given.weight), val(given.scale), bits)
            if own < EXACT_BITS:
                node.kwargs = {**node.kwargs, "x_bits": own}
            else:
                left += 1
    return [f"{left} linears: their weights are no integers"] if left else []
