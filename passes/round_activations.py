"""`round_activations`: linears of 4- and 8-bit integers multiply integers, not floats."""

from __future__ import annotations

from torch import fx

from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import EXACT_BITS, quantized_linear, supports_bits
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, calls, val


@graph_pass(rounds=True)
def round_activations(gm: fx.GraphModule, *, bits: int | None) -> Notes:
    """Let CPUs multiply a weight's integers without dequantizing them: inputs are rounded to 16
    bits, relative to the largest of each 32, or to 8 bits for 4-bit weights if `bits` is 8.
    docs/quantization.md shows how far the results are from float32.

    `bits`: None if something else is faster; then nothing is done.

    Before:
        y = llmc.quantized_linear(x, w, scale, zero, b, minimum)
    After:
        y = llmc.quantized_linear(x, w, scale, zero, b, minimum, 16)
    and llmc.quantized_expert_linear in the same way.
    """
    if bits is None:
        return ["integer activations are not requested, or would not be faster here"]
    left = 0
    for op in (quantized_linear, quantized_expert_linear):
        for node in calls(gm.graph, op.overload):
            given = arguments(node)
            own = supports_bits(val(given.weight), val(given.scale), bits)
            if own < EXACT_BITS:
                node.kwargs = {**node.kwargs, "x_bits": own}
            else:
                left += 1
    return [f"{left} linears: their weights are not integers"] if left else []
