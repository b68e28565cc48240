"""`fused_quantized_linear`: `quantized_linear` with the norm before it and the activation or
residual sum after it, as `fused_linear`; `norm_add_quantized_linear` as `norm_add_linear`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.act_mul import activated
from llmc.kernels.layer_norm import layer_norm
from llmc.kernels.quantized_linear import CHANNELS, quantized_linear
from llmc.kernels.registry import Case, op
from llmc.kernels.rms_norm import norm_add, rms_norm


def _shape(*, x: Tensor, weight: Tensor, act: str | None, gated: bool, **others: object) -> Tensor:
    channels = weight.shape[0] * CHANNELS
    return x.new_empty(*x.shape[:-1], channels // (2 if act and gated else 1))


@op(shape=_shape)
def fused_quantized_linear(
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
    """act_mul(rms_norm(x) w^T + bias) + residual in x's dtype; each part is optional.

    x [..., K]; weight, scale, zero, bias [N] and minimum as in `quantized_linear`, with its exact
    inputs. eps None: no norm; otherwise norm_weight [K] and offset as in `rms_norm`. act as in
    `act_mul`: the result has N / 2 columns, and N is a multiple of 32; if not gated, as in
    `activate`: it has N. residual: same shape as the result. If centered, the norm is `layer_norm`
    with norm_bias [K], without an offset.
    """
    if eps is not None and centered:
        assert offset == 0, "a centered norm has no offset"
        x = layer_norm.reference(x, norm_weight, norm_bias, eps)
    elif eps is not None:
        x = rms_norm.reference(x, norm_weight, eps, offset)
    wide = None if bias is None else bias.float()
    y = quantized_linear.reference(x.float(), weight, scale, zero, wide, minimum)
    if act is not None:
        y = activated(y, act, gated)
    out: Tensor = (y if residual is None else y + residual.float()).to(x.dtype)
    return out


@fused_quantized_linear.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every way in which `quantized_linear` is called, with other parts around it in turn."""
    gen = torch.Generator(device="cpu").manual_seed(0)
    cases = (case for make in quantized_linear.case_makers for case in make(device, dtype))
    for i, (x, weight, scale, zero, bias, *rest) in enumerate(cases):
        minimum, bits = (*rest, None, None)[:2]
        channels = weight.shape[0] * CHANNELS
        act = ("silu", None, "gelu_tanh")[i % 3] if channels % (2 * CHANNELS) == 0 else None
        size = *x.shape[:-1], channels // (1 if act is None else 2)
        if not isinstance(bits, int) and bool(x.isfinite().all()):
            # mxfp4's weights are so large that sums, which residuals reduce, would be above 10
            gain = torch.randn(x.shape[-1], generator=gen).to(device, dtype) / 4
            residual = torch.randn(size, generator=gen).to(device, dtype)
            eps, offset = (1e-5, float(i % 2)) if i % 4 else (None, 0.0)
            yield (
                x, weight, scale, zero, bias, minimum, gain if i % 4 > 1 else None, eps, offset,
                act, residual if i % 5 else None,
            )  # fmt: skip
            if i % 4 == 2:
                shift = gain.flip(0) if i % 8 == 2 else None
                linear = (weight, scale, zero, bias, minimum, gain, 1e-5, 0.0, act)
                yield x, *linear, residual, True, True, shift
            if i % 3 == 1:
                yield x, weight, scale, zero, bias, minimum, None, None, 0.0, "relu", None, False


def _shapes(
    *, x: Tensor, weight: Tensor, act: str | None, gated: bool, **others: object
) -> tuple[Tensor, Tensor]:
    return _shape(x=x, weight=weight, act=act, gated=gated), x.new_empty(x.shape)


@op(shape=_shapes)
def norm_add_quantized_linear(
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
    """(fused_quantized_linear of the sum, the sum): `norm_add` and the linear that reads it.

    x, residual and the sum [..., K], x_weight [K], all in one dtype: the sum is residual +
    rms_norm(x), with x_eps and x_offset. The other arguments as in `fused_quantized_linear`.
    """
    total = norm_add.reference(x, residual, x_weight, x_eps, x_offset)
    linear = (weight, scale, zero, bias, minimum, norm_weight, eps, offset, act, None, gated)
    return fused_quantized_linear.reference(total, *linear), total


@norm_add_quantized_linear.cases
def _sum_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for x, *linear in _cases(device, dtype):
        *around, residual = linear[:10]
        if len(linear) in (10, 11):  # not centered
            gain = None if residual is None else x.flatten(0, -2)[0].flip(0) / 2
            yield x, x.flip(-1) / 2 + 0.3, gain, 1e-5, around[7], *around, *linear[10:]
