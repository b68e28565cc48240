"""The ops of rms_norm.py and layer_norm.py in Triton: one program per row.

Inductor fuses norms better than this; these are for graphs that run uncompiled on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.layer_norm import add_layer_norm, layer_norm
from llmc.kernels.rms_norm import add_rms_norm, norm_add, norm_add_norm, rms_norm
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.configs import row_warps
from llmc.kernels.triton.define import define, same_dtype, supports_tensors
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, power_of_2

_MAX_WIDTH = 65536


@triton.jit
def normalized(y, weight, i, eps, offset, WIDTH: tl.constexpr):
    """rms_norm of a row y [BLOCK], which is zero beyond WIDTH, in float32."""
    y *= 1 / tl.sqrt_rn(tl.sum(y * y, axis=0) / WIDTH + eps)
    if weight is not None:
        y *= tl.load(weight + i, mask=i < WIDTH, other=0.0).to(tl.float32) + offset
    return y


@triton.jit
def centered(y, weight, bias, i, eps, WIDTH: tl.constexpr):
    """layer_norm of a row y [BLOCK], which is zero beyond WIDTH, in float32."""
    y = tl.where(i < WIDTH, y - tl.sum(y, axis=0) / WIDTH, 0.0)
    y *= 1 / tl.sqrt_rn(tl.sum(y * y, axis=0) / WIDTH + eps)
    if weight is not None:
        y *= tl.load(weight + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    return y


@triton.jit
def mean_and_factor(
    x, x_row, rows, eps, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The mean and 1 / sqrt(variance + eps) of up to BLOCK_M rows of K inputs, for a linear that
    normalizes them. The sums are of differences to a row's first input, so that a large mean does
    not cancel."""
    CHUNK: tl.constexpr = BLOCK_K if BLOCK_K > 2048 // BLOCK_M else 2048 // BLOCK_M
    m = tl.arange(0, BLOCK_M)
    at = x + m[:, None] * x_row
    base = tl.load(at, mask=(m < rows)[:, None], other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK_M, CHUNK], tl.float32)
    squares = tl.zeros([BLOCK_M, CHUNK], tl.float32)
    for k0 in tl.range(0, K, CHUNK):
        k = k0 + tl.arange(0, CHUNK)
        known = (m < rows)[:, None] & (k < K)[None, :]
        apart = tl.load(at + k[None, :], mask=known, other=0.0).to(tl.float32) - base
        apart = tl.where(known, apart, 0.0)
        sums += apart
        squares += apart * apart
    mean = tl.sum(sums, axis=1) / K
    variance = tl.maximum(tl.sum(squares, axis=1) / K - mean * mean, 0.0)
    return tl.sum(base, axis=1) + mean, 1 / tl.sqrt_rn(variance + eps)


@triton.jit
def factor_of_rows(
    x, x_row, rows, eps, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """1 / sqrt(mean(x^2) + eps) of up to BLOCK_M rows of K inputs, for `sum_with_norm`."""
    CHUNK: tl.constexpr = BLOCK_K if BLOCK_K > 2048 // BLOCK_M else 2048 // BLOCK_M
    m = tl.arange(0, BLOCK_M)
    squares = tl.zeros([BLOCK_M, CHUNK], tl.float32)
    for k0 in tl.range(0, K, CHUNK):
        k = k0 + tl.arange(0, CHUNK)
        known = (m < rows)[:, None] & (k < K)[None, :]
        y = tl.load(x + m[:, None] * x_row + k[None, :], mask=known, other=0.0).to(tl.float32)
        squares += y * y
    return 1 / tl.sqrt_rn(tl.sum(squares, axis=1) / K + eps)


@triton.jit
def sum_with_norm(a, factor, more, weight, offset, k, reached):
    """Inputs [..., K] of a linear, from number k on: the sum of `more` and of a after an rms_norm.
    Both steps are rounded, as in `norm_add`. factor [..., 1]: see `factor_of_rows`; reached [K]:
    whether there is an input."""
    y = a.to(tl.float32) * factor
    if weight is not None:
        y *= tl.load(weight + k, mask=reached, other=0.0).to(tl.float32) + offset
    return (y.to(a.dtype).to(tl.float32) + more.to(tl.float32)).to(a.dtype)


@triton.jit
def centered_inputs(a, mean, factor, weight, bias, k, reached, WEIGHTED: tl.constexpr):
    """Inputs a [M, K] of a linear, from number k on, after a layer_norm, in float32. mean, factor
    [M]: see `mean_and_factor`; reached [K]: whether there is an input."""
    y = (a.to(tl.float32) - mean[:, None]) * factor[:, None]
    if WEIGHTED:
        y *= tl.load(weight + k, mask=reached, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        y += tl.load(bias + k, mask=reached, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def norm_kernel(
    x, residual, x_weight, weight, bias, out, total, x_row, residual_row, x_eps, x_offset, eps,
    offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, NORM_X: tl.constexpr,
    CENTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """NORM_X: x is normalized before it is added. out None: the sum is all that is stored.
    CENTERED: the result is a layer_norm."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    if PDL:
        wait_for_previous()
    y = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    if NORM_X:
        y = normalized(y, x_weight, i, x_eps, x_offset, WIDTH)
        y = y.to(x.dtype.element_ty).to(tl.float32)
    if ADD:
        y += tl.load(residual + row * residual_row + i, mask=inside, other=0.0).to(tl.float32)
        rounded = y.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + i, rounded, mask=inside)
        y = rounded.to(tl.float32)
    if out is not None:
        if CENTERED:
            y = centered(y, weight, bias, i, eps, WIDTH)
        else:
            y = normalized(y, weight, i, eps, offset, WIDTH)
        tl.store(out + row * WIDTH + i, y.to(out.dtype.element_ty), mask=inside)


_Norm = tuple[Tensor | None, float, float]  # weight, eps and offset
_NONE: _Norm = (None, 0.0, 0.0)


def _launch(
    x: Tensor, residual: Tensor | None, of_x: _Norm | None, norm: _Norm,
    out: Tensor | None, total: Tensor | None, centered: bool = False, bias: Tensor | None = None,
) -> Launch:  # fmt: skip
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    other = flat if residual is None else residual.reshape(-1, width)
    block = power_of_2(width)
    pdl = dependent_launch.applies_to(x.device)
    (weight, eps, offset), (x_weight, x_eps, x_offset) = norm, of_x or _NONE
    return Launch(
        kernel=norm_kernel,
        grid=(flat.shape[0],),
        args={
            "x": flat, "residual": other, "x_weight": x_weight, "weight": weight, "bias": bias,
            "out": out, "total": total, "x_row": flat.stride(0), "residual_row": other.stride(0),
            "x_eps": x_eps, "x_offset": x_offset, "eps": eps, "offset": offset,
        },
        constants={
            "WIDTH": width, "BLOCK": block, "ADD": residual is not None,
            "NORM_X": of_x is not None, "CENTERED": centered, "PDL": pdl,
        },
        num_warps=row_warps(block),
        pdl=pdl,
    )  # fmt: skip


def plan(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, centered: bool = False,
    bias: Tensor | None = None,
) -> Plan[Tensor]:  # fmt: skip
    """An RMSNorm or, if centered, a LayerNorm."""
    out = x.new_empty(x.shape)
    launch = _launch(x, None, None, (weight, eps, offset), out, None, centered, bias)
    return Plan(out=out, launches=(launch,))


def add_plan(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> Plan[tuple[Tensor, Tensor]]:
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    launch = _launch(x, residual, None, (weight, eps, offset), out, total)
    return Plan(out=(out, total), launches=(launch,))


def norm_add_plan(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> Plan[Tensor]:
    total = x.new_empty(x.shape)
    launch = _launch(x, residual, (weight, eps, offset), _NONE, None, total)
    return Plan(out=total, launches=(launch,))


def norm_add_norm_plan(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float,
    next_weight: Tensor | None, next_eps: float, next_offset: float,
) -> Plan[tuple[Tensor, Tensor]]:  # fmt: skip
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    of_x, of_sum = (weight, eps, offset), (next_weight, next_eps, next_offset)
    launch = _launch(x, residual, of_x, of_sum, out, total)
    return Plan(out=(out, total), launches=(launch,))


def sum_of_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float,
    next_weight: Tensor | None, next_eps: float | None, next_offset: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`norm_add_norm` or, without next_eps, `norm_add` as both results."""
    of_x = (weight, eps, offset)
    if next_eps is None:
        total = norm_add_plan(x, residual, *of_x).run()
        return total, total
    return norm_add_norm_plan(x, residual, *of_x, next_weight, next_eps, next_offset).run()


# the arguments of `with_sum` for a kernel's other plans
NO_SUM: Mapping[str, Any] = {
    "before": None, "x_weight": None, "total_out": None, "before_row": 0, "x_eps": 0.0,
    "x_offset": 0.0,
}  # fmt: skip


def with_sum(
    linear: Plan[Tensor], x: Tensor, residual: Tensor, weight: Tensor | None, eps: float,
    offset: float,
) -> Plan[tuple[Tensor, Tensor]]:  # fmt: skip
    """The plan of a linear which reads a sum, the second result, that its kernel makes of x as
    `norm_add` does."""
    (launch,) = linear.launches
    total, before = x.new_empty(x.shape), residual.reshape(-1, x.shape[-1])
    of_sum = {
        "before": before, "x_weight": weight, "total_out": total, "before_row": before.stride(0),
        "x_eps": eps, "x_offset": offset,
    }  # fmt: skip
    launch = replace(launch, args={**launch.args, **of_sum})
    return Plan(out=(linear.out, total), launches=(launch,))


def layer_plan(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Plan[Tensor]:
    return plan(x, weight, eps, 0.0, True, bias)


def add_layer_plan(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Plan[tuple[Tensor, Tensor]]:
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    launch = _launch(x, residual, None, (weight, eps, 0.0), out, total, True, bias)
    return Plan(out=(out, total), launches=(launch,))


def supports(
    *, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, **others: object
) -> bool:
    return supports_tensors(x, weight, bias) and x.shape[-1] <= _MAX_WIDTH


def _add_supports(
    *, x: Tensor, residual: Tensor, next_weight: Tensor | None = None, **others: Any
) -> bool:
    fits = x.shape == residual.shape and same_dtype(x, residual)
    return fits and supports_tensors(residual, next_weight) and supports(x=x, **others)


define(rms_norm, plan=plan, supports=supports)
define(add_rms_norm, plan=add_plan, supports=_add_supports)
define(norm_add, plan=norm_add_plan, supports=_add_supports)
define(norm_add_norm, plan=norm_add_norm_plan, supports=_add_supports)
define(layer_norm, plan=layer_plan, supports=supports)
define(add_layer_norm, plan=add_layer_plan, supports=_add_supports)
