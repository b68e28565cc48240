"""`quantized_linear`, with what is fused around it, on GPUs: the kernels for the number of rows.

Up to FUSED_ROWS rows are one kernel, with the norm, the activation and the sum. That number was
measured for weights in 16 bits; how many rows it should be here is NOT YET MEASURED.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmc.kernels.fused_quantized_linear import (
    fused_quantized_linear,
    norm_add_quantized_linear,
)
from llmc.kernels.quantized_linear import EXACT_BITS, quantized_linear
from llmc.kernels.triton import act_mul, linear_configs, norm
from llmc.kernels.triton.define import define, same_dtype, supports_tensors
from llmc.kernels.triton.dequantize import wide_linear
from llmc.kernels.triton.linear_configs import CENTERED_ROWS, FUSED_ROWS, wide_config
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


def run_fused(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    minimum: Tensor | None,
    norm_weight: Tensor | None,
    eps: float | None,
    offset: float,
    act: str | None,
    residual: Tensor | None,
    gated: bool = True,
    centered: bool = False,
    norm_bias: Tensor | None = None,
) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if takes(x, eps, centered):
        return plan(
            x, weight, scale, zero, bias, minimum, norm_weight, eps, offset, act, residual,
            gated, centered, norm_bias,
        ).run()  # fmt: skip
    if eps is not None:
        x = norm.plan(x, norm_weight, eps, offset, centered, norm_bias).run()
        plain = (x, weight, scale, zero, bias, minimum, None, None, 0.0)
        return run_fused(*plain, act, residual, gated)
    linear = (x, weight, scale, zero, bias, minimum)
    if (act is None or not gated) and not _is_wide(rows, x, weight, scale, codes=False):
        return plan(*linear, act=act, residual=residual, gated=False).run()
    y = run(*linear)
    if act is not None:
        y = act_mul.plan_activation(y, act, gated).run()
    return y if residual is None else y.add_(residual)


def run_sum(
    x: Tensor,
    residual: Tensor,
    x_weight: Tensor | None,
    x_eps: float,
    x_offset: float,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    minimum: Tensor | None,
    norm_weight: Tensor | None,
    eps: float | None,
    offset: float,
    act: str | None,
    gated: bool = True,
) -> tuple[Tensor, Tensor]:
    of_x, of_sum = (x_weight, x_eps, x_offset), (norm_weight, eps, offset)
    linear = (weight, scale, zero, bias, minimum)
    if x.numel() // x.shape[-1] <= CENTERED_ROWS and takes(x, eps):
        return norm.with_sum(plan(x, *linear, *of_sum, act, None, gated), x, residual, *of_x).run()
    y, total = norm.sum_of_norm(x, residual, *of_x, *of_sum)
    return run_fused(y, *linear, None, None, 0.0, act, None, gated), total


def takes(x: Tensor, eps: float | None, centered: bool = False) -> bool:
    """Whether one kernel computes these rows."""
    rows = x.numel() // x.shape[-1]
    # a float16 row before normalization times the norm's weight can overflow float16
    may_overflow = x.dtype == torch.float16 and eps is not None and not centered
    return 0 < rows <= (CENTERED_ROWS if centered else FUSED_ROWS) and not may_overflow


def _is_wide(rows: int, x: Tensor, weight: Tensor, scale: Tensor, *, codes: bool) -> bool:
    """Whether the weight is not dequantized in each tile of rows, which is best for few."""
    usual = linear_configs.SCALED_ROWS if codes else linear_configs.WIDE_ROWS
    if not usual // 4 <= rows < 4 * usual:  # no table is needed there
        return rows >= usual
    config = wide_config(per_word(format_of(weight, scale)), x.element_size(), codes)
    return rows >= config.min_rows


def _supports_fused(
    *,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    act: str | None,
    gated: bool,
    norm_bias: Tensor | None,
    **product: Any,
) -> bool:
    whole = act is None or not gated or product["weight"].shape[0] % 2 == 0
    fits = supports_tensors(norm_weight, norm_bias, residual) and same_dtype(product["x"], residual)
    return fits and whole and supports(**product, x_bits=EXACT_BITS)


def _supports_sum(*, x: Tensor, residual: Tensor, x_weight: Tensor | None, **linear: Any) -> bool:
    fits = norm.supports(x=x, weight=x_weight) and x.shape == residual.shape
    fits = fits and supports_tensors(residual) and same_dtype(x, residual)
    return fits and _supports_fused(x=x, residual=None, norm_bias=None, **linear)


define(norm_add_quantized_linear, run=run_sum, supports=_supports_sum)
define(quantized_linear, run=run, supports=supports)
define(fused_quantized_linear, run=run_fused, supports=_supports_fused)
