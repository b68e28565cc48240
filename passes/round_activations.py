"""`round_activations`: linears of low-bit weights multiply integers or fp8, not floats."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import EXACT_BITS, quantized_linear, supports_bits
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, calls, val
from llmc.passes.quantize_linears import is_head


@graph_pass(rounds=True)
def round_activations(gm: fx.GraphModule, *, bits: int | None, float8: bool = False) -> Notes:
    """Let CPUs multiply a weight's integers without dequantizing them: inputs are rounded to 16
    bits, relative to the largest of each 32, or to 8 for integers of 4 to 6 bits if `bits` is 8.
    docs/quantization.md shows how far the results are from float32.

    `bits`: None if something else is faster; then inputs of integer weights are not rounded.
    `float8`: inputs of fp8 weights are rounded to fp8, as their quantizers intend, but not those of
    the output head: its errors directly change the logits, and it multiplies few rows.

    Before:
        y = llmc.quantized_linear(x, w, scale, zero, b, minimum)
    After:
        y = llmc.quantized_linear(x, w, scale, zero, b, minimum, 16)
    and llmc.quantized_expert_linear in the same way.
    """
    if bits is None and not float8:
        return ["8-bit activations are not requested, or would not be faster here"]
    left: Counter[str] = Counter()
    for op in (quantized_linear, quantized_expert_linear):
        for node in calls(gm.graph, op.overload):
            own, reason = _bits_of(node, bits, float8)
            if own < EXACT_BITS:
                node.kwargs = {**node.kwargs, "x_bits": own}
            else:
                left[reason] += 1
    return [f"{count} linears: {reason}" for reason, count in left.items()]


def _bits_of(node: fx.Node, bits: int | None, float8: bool) -> tuple[int, str]:
    """`x_bits` of a call; if that is EXACT_BITS, also the reason."""
    given = arguments(node)
    weight, scale = val(given.weight), val(given.scale)
    if weight.dtype == torch.float8_e4m3fn:
        if not float8:
            return EXACT_BITS, "inputs in fp8 are not requested"
        if is_head(given.x):
            return EXACT_BITS, "it is the output head"
        return supports_bits(weight, scale, 8), "their scales are of fewer than 32 inputs"
    if bits is None:
        return EXACT_BITS, "integer products would not be faster here"
    return supports_bits(weight, scale, bits), ""
