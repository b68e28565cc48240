"""`quantized_linear` on GPUs: the kernels for the number of rows."""

from __future__ import annotations

from torch import Tensor

from llmc.kernels.quantized_linear import EXACT_BITS, quantized_linear
from llmc.kernels.triton import linear_configs
from llmc.kernels.triton.define import define
from llmc.kernels.triton.dequantize import wide_linear
from llmc.kernels.triton.linear_configs import wide_config
from llmc.kernels.triton.quantized_linear import format_of, per_word, plan, supports
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
        if multiplies_codes(x.device) and _is_wide(rows, x, weight, scale, codes=True):
            return scaled_linear(x, weight, scale, bias)
        x = plan_rounded(x, x.shape[-1] // scale.shape[1]).run()
    if _is_wide(rows, x, weight, scale, codes=False):
        return wide_linear(x, weight, scale, zero, bias, minimum)
    return plan(x, weight, scale, zero, bias, minimum).run()


def _is_wide(rows: int, x: Tensor, weight: Tensor, scale: Tensor, *, codes: bool) -> bool:
    """Whether the weight is not dequantized in each tile of rows, which is best for few."""
    usual = linear_configs.SCALED_ROWS if codes else linear_configs.WIDE_ROWS
    if not usual // 4 <= rows < 4 * usual:  # no table is needed there
        return rows >= usual
    config = wide_config(per_word(format_of(weight, scale)), x.element_size(), codes)
    return rows >= config.min_rows


define(quantized_linear, run=run, supports=supports)
