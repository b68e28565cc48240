"""`quantized_linear` on GPUs: the kernels for the number of rows."""

from __future__ import annotations

from torch import Tensor

from llmc.kernels.quantized_linear import EXACT_BITS, quantized_linear
from llmc.kernels.triton.define import define
from llmc.kernels.triton.dequantize import wide_linear
from llmc.kernels.triton.linear_configs import WIDE_ROWS
from llmc.kernels.triton.quantized_linear import plan, supports


def run(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    minimum: Tensor | None = None,
    x_bits: int = EXACT_BITS,
) -> Tensor:
    if x.numel() >= WIDE_ROWS * x.shape[-1]:
        return wide_linear(x, weight, scale, zero, bias, minimum)
    return plan(x, weight, scale, zero, bias, minimum).run()


define(quantized_linear, run=run, supports=supports)
