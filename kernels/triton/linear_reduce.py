"""The last step of a linear with split sums: the partial sums are added in a fixed order.

So results are the same in every run, unlike with atomic additions in arbitrary order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.triton.attention_kernel import tanh
from llmc.kernels.triton.launch import Launch, cdiv

BLOCK = 256


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "silu":
        return x / (1 + tl.exp(-x))
    elif ACT == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACT == "gelu_tanh")
        return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit(do_not_specialize=["rows"])
def reduce_kernel(
    partial, squares, bias, residual, out, rows, residual_row, eps,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """partial [SPLITS, rows, N or 2 N], squares [SPLITS, rows]: sums over each part of K."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    WIDTH: tl.constexpr = N if ACT is None else 2 * N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.zeros([BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N], tl.float32)
    total = 0.0
    for split in tl.static_range(SPLITS):
        at = partial + (split * rows + row) * WIDTH + n
        y += tl.load(at, mask=inside, other=0.0)
        if ACT is not None:
            up += tl.load(at + N, mask=inside, other=0.0)
        if NORM:
            total += tl.load(squares + split * rows + row)
    if NORM:
        factor = 1 / tl.sqrt_rn(total / K + eps)
        y *= factor
        up *= factor
    if BIAS:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if ACT is not None:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)
    if ACT is not None:
        y = activate(y, ACT) * up
    if ADD:
        y += tl.load(residual + row * residual_row + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, y.to(out.dtype.element_ty), mask=inside)


def reduce_launch(
    partial: Tensor, bias: Tensor | None, out: Tensor, depth: int, *, pdl: bool,
    squares: Tensor | None = None, eps: float = 0.0, act: str | None = None,
    residual: Tensor | None = None,
) -> Launch:  # fmt: skip
    """out [rows, N] from partial [SPLITS, rows, N], or [.., 2 N] if `act` gates one half."""
    splits, rows, _ = partial.shape
    args: dict[str, Any] = {
        "partial": partial, "squares": squares, "bias": bias, "residual": residual, "out": out,
        "rows": rows, "residual_row": 0 if residual is None else residual.stride(0), "eps": eps,
    }  # fmt: skip
    constants = {
        "N": out.shape[-1], "K": depth, "SPLITS": splits, "BLOCK_N": BLOCK,
        "NORM": squares is not None, "BIAS": bias is not None, "ACT": act,
        "ADD": residual is not None, "PDL": pdl,
    }  # fmt: skip
    return Launch(
        kernel=reduce_kernel,
        grid=(rows, cdiv(out.shape[-1], BLOCK)),
        args=args,
        constants=constants,
        num_warps=2,
        pdl=pdl,
    )
