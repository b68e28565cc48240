"""`rms_norm` and `add_rms_norm` in Triton: one program per row.

Inductor fuses norms better than this; these are for graphs that run uncompiled on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.rms_norm import add_rms_norm, rms_norm
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.configs import row_warps
from llmc.kernels.triton.define import define, same_dtype, supports_tensors
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, power_of_2

_MAX_WIDTH = 65536


@triton.jit
def norm_kernel(
    x, residual, weight, out, total, x_row, residual_row, eps, offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    if PDL:
        wait_for_previous()
    y = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(residual + row * residual_row + i, mask=inside, other=0.0).to(tl.float32)
        rounded = y.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + i, rounded, mask=inside)
        y = rounded.to(tl.float32)
    y *= 1 / tl.sqrt_rn(tl.sum(y * y, axis=0) / WIDTH + eps)
    if WEIGHTED:
        y *= tl.load(weight + i, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + row * WIDTH + i, y.to(out.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float,
    out: Tensor, total: Tensor | None,
) -> Launch:  # fmt: skip
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    other = flat if residual is None else residual.reshape(-1, width)
    block = power_of_2(width)
    pdl = dependent_launch.applies_to(x.device)
    return Launch(
        kernel=norm_kernel,
        grid=(flat.shape[0],),
        args={
            "x": flat, "residual": other, "weight": weight, "out": out, "total": total,
            "x_row": flat.stride(0), "residual_row": other.stride(0),
            "eps": eps, "offset": offset,
        },
        constants={
            "WIDTH": width, "BLOCK": block,
            "ADD": residual is not None, "WEIGHTED": weight is not None, "PDL": pdl,
        },
        num_warps=row_warps(block),
        pdl=pdl,
    )  # fmt: skip


def plan(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Plan[Tensor]:
    out = x.new_empty(x.shape)
    return Plan(out=out, launches=(_launch(x, None, weight, eps, offset, out, None),))


def add_plan(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> Plan[tuple[Tensor, Tensor]]:
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    launch = _launch(x, residual, weight, eps, offset, out, total)
    return Plan(out=(out, total), launches=(launch,))


def supports(*, x: Tensor, weight: Tensor | None, **others: object) -> bool:
    return supports_tensors(x, weight) and x.shape[-1] <= _MAX_WIDTH


def _add_supports(*, x: Tensor, residual: Tensor, weight: Tensor | None, **others: object) -> bool:
    fits = x.shape == residual.shape and same_dtype(x, residual)
    return fits and supports_tensors(residual) and supports(x=x, weight=weight)


define(rms_norm, plan=plan, supports=supports)
define(add_rms_norm, plan=add_plan, supports=_add_supports)
