"""`quantized_linear` on GPUs: the kernels for the number of rows."""

from __future__ import annotations

from torch import Tensor

from llmc.kernels.quantized_linear import EXACT_BITS, quantized_linear
from llmc.kernels.triton.define import define
from llmc.kernels.triton.dequantize import wide_linear
from llmc.kernels.triton.linear_configs import SCALED_ROWS, WIDE_ROWS
from llmc.kernels.triton.quantized_linear import plan, supports
from llmc.kernels.triton.scaled_linear import multiplies_codes, plan_rounded, scaled_linear


def run(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    minimum: Tensor | None = None,
    x_bits: int = EXACT_BITS,
) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if x_bits < EXACT_BITS:
        if rows >= SCALED_ROWS and multiplies_codes(x.device):
            return scaled_linear(x, weight, scale, bias)
        x = plan_rounded(x, x.shape[-1] // scale.shape[1]).run()
    if rows >= WIDE_ROWS:
        return wide_linear(x, weight, scale, zero, bias, minimum)
    return plan(x, weight, scale, zero, bias, minimum).run()


define(quantized_linear, run=run, supports=supports)
