"""`expert_linear` in Triton: one grouped matrix product over rows sorted by expert.

Rows are sorted on the device, and each expert's rows are tiled separately. The grid depends only on
shapes; a program finds its (expert, tile) from the experts' offsets, so the host never reads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.triton.attention_plan import at, locate
from llmc.kernels.triton.configs import expert_config
from llmc.kernels.triton.define import define, needs_upcast, same_dtype, supports_tensors
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2


@triton.jit
def rows_of_tile(
    order, offsets, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr
):
    """(expert, its rows of x in this program's tile, mask of valid rows). If the expert is EXPERTS
    or more, the program has nothing to do."""
    e = tl.arange(0, EXPERTS_PAD)
    begin = tl.load(offsets + e, mask=e < EXPERTS, other=0)
    count = tl.load(offsets + e + 1, mask=e < EXPERTS, other=0) - begin
    expert, tile = locate(tl.program_id(0), (count + BLOCK_M - 1) // BLOCK_M, EXPERTS_PAD)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = m < at(count, expert, EXPERTS_PAD)
    row = tl.load(order + at(begin, expert, EXPERTS_PAD) + m, mask=mine, other=0)
    return expert, row.to(tl.int64), mine


@triton.jit
def expert_kernel(
    x, weight, bias, order, offsets, out, x_row, weight_expert, weight_n, weight_k, bias_expert,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """order: the row of x at each sorted index; offsets [EXPERTS + 1]: each expert's first one."""
    expert, row, mine = rows_of_tile(order, offsets, EXPERTS, EXPERTS_PAD, BLOCK_M)
    if expert >= EXPERTS:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = weight + expert.to(tl.int64) * weight_expert + n[None, :] * weight_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + row[:, None] * x_row + k[None, :],
            mask=mine[:, None] & (k < K)[None, :],
            other=0.0,
        )
        b = tl.load(w + k[:, None] * weight_k, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + expert.to(tl.int64) * bias_expert + n, mask=n < N, other=0.0)[None, :]
    tl.store(
        out + row[:, None] * N + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=mine[:, None] & (n < N)[None, :],
    )


def sorted_rows(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(rows sorted by expert, the offset of each expert's rows and the end of the last's)."""
    ordered, order = expert.sort(stable=True)
    # rows of experts outside [0, E) sort before the first offset or after the last
    edges = torch.arange(experts + 1, device=expert.device, dtype=ordered.dtype)
    return order, torch.searchsorted(ordered, edges).int()


def tiles_of(rows: int, experts: int, block_m: int) -> int:
    """A bound on the number of tiles: an expert without rows has none, and rounding up adds less
    than one tile per expert."""
    return min(rows, rows // block_m + experts)


def plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, transposed: bool
) -> Plan[Tensor]:
    rows, k = x.shape
    experts = weight.shape[0]
    n = weight.shape[2] if transposed else weight.shape[1]
    n_axis, k_axis = (2, 1) if transposed else (1, 2)
    config = expert_config(rows, experts, x.element_size())
    order, offsets = sorted_rows(expert, experts)
    out = x.new_zeros(rows, n)
    launch = Launch(
        kernel=expert_kernel,
        grid=(tiles_of(rows, experts, config.block_m), cdiv(n, config.block_n)),
        args={
            "x": x, "weight": weight, "bias": bias, "order": order, "offsets": offsets, "out": out,
            "x_row": x.stride(0), "weight_expert": weight.stride(0),
            "weight_n": weight.stride(n_axis), "weight_k": weight.stride(k_axis),
            "bias_expert": 0 if bias is None else bias.stride(0),
        },
        constants={
            "N": n, "K": k, "EXPERTS": experts, "EXPERTS_PAD": power_of_2(experts),
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
            "BIAS": bias is not None, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "UPCAST": needs_upcast(x.dtype),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def _supports(*, x: Tensor, weight: Tensor, bias: Tensor | None, **others: object) -> bool:
    return supports_tensors(x, weight, bias) and same_dtype(x, weight, bias)


define(expert_linear, plan=plan, supports=_supports)
