"""fp8 weights with inputs rounded to fp8, whose codes tensor cores multiply.

x is rounded by one kernel and the weight's blocks become rows of bytes, each once. One scale per
row and channel is what the library supports; for scales of groups, a kernel scales each group's
sum. Few rows are bound by reading the weight, and older GPUs have no such products: there the
rounded x is multiplied like any other.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.quantized_linear import CHANNELS
from llmc.kernels.triton.configs import row_warps
from llmc.kernels.triton.dequantize import slab, slabs
from llmc.kernels.triton.fp8 import E4M3, converts, narrow, widen
from llmc.kernels.triton.launch import Launch, Plan, cdiv, interpreted, power_of_2
from llmc.kernels.triton.linear_configs import WIDE_BLOCK, scaled_tiles

_ROUND_ELEMENTS = 2048  # of groups that are shorter than a row


@triton.jit
def round_kernel(
    x, codes, scale, out, x_row,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """x [rows, K] -> codes [rows, K] and scale [rows, K / GROUP]; without CODES, their products in
    `out` [rows, K]. A program rounds some groups of a row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i = tl.arange(0, BLOCK)
    known = (i < GROUP)[None, :] & (group < K // GROUP)[:, None]
    k = group[:, None] * GROUP + i[None, :]
    values = tl.load(x + row * x_row + k, mask=known, other=0.0).to(tl.float32)
    # magnitudes order as their bits do, and NaN is above infinity
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, axis=1).to(tl.float32, bitcast=True)
    is_finite = largest < float("inf")
    factor = tl.where(
        is_finite, tl.div_rn(largest, tl.full([GROUPS], 448.0, tl.float32)), float("nan")
    )
    is_zero = is_finite & (largest <= 1e-30)
    divisor = tl.where(is_zero, 1.0, factor)
    values = tl.where(is_zero[:, None], 0.0, values)
    code = narrow(tl.div_rn(values, divisor[:, None] + tl.zeros([GROUPS, BLOCK], tl.float32)), E4M3)
    if CODES:
        tl.store(codes + row * K + k, code, mask=known)
        tl.store(scale + row * (K // GROUP) + group, factor, mask=group < K // GROUP)
    else:
        rounded = widen(code, E4M3, False).to(tl.float32) * factor[:, None]
        tl.store(out + row * K + k, rounded.to(out.dtype.element_ty), mask=known)


@triton.jit
def unblock_kernel(words, out, K: tl.constexpr, BLOCK_W: tl.constexpr):
    """words [.., K / 4, 16] -> out [.. * 16, K / 4]: the bytes of each channel in order."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 16)[:, None]
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    known = w < K // 4
    q = tl.load(words + block * (K // 4 * 16) + w * 16 + lane, mask=known, other=0)
    tl.store(out + (block * 16 + lane) * (K // 4) + w, q, mask=known)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x, x_scale, weight, scale, bias, out, rows, out_row,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """x [rows, K] and weight [N, K] float8, x_scale [rows, K / GROUP], scale [N / 16, K / GROUP,
    16] -> out [rows, N]. BLOCK_K divides GROUP, unless that is K."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, known = m < rows, n < N
    row = m.to(tl.int64)
    a_row = x + row[:, None] * K
    b_row = weight + n.to(tl.int64)[None, :] * K
    a_scale = x_scale + row * (K // GROUP)
    b_scale = scale + (n // 16).to(tl.int64) * (K // GROUP * 16) + n % 16
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = tl.load(a_row + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(b_row + k[:, None], mask=known[None, :] & (k < K)[:, None], other=0.0)
        # Hopper's tensor cores drop low bits of longer sums: each step's is added in float32
        if GROUP == K:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
        else:
            part = tl.dot(a, b, max_num_imprecise_acc=BLOCK_K)
            of_rows = tl.load(a_scale + k0 // GROUP, mask=inside, other=0.0)
            of_channels = tl.load(b_scale + k0 // GROUP * 16, mask=known, other=0.0).to(tl.float32)
            acc += part * (of_rows[:, None] * of_channels[None, :])
    if GROUP == K:
        of_rows = tl.load(a_scale, mask=inside, other=0.0)
        of_channels = tl.load(b_scale, mask=known, other=0.0).to(tl.float32)
        acc *= of_rows[:, None] * of_channels[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=known, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * out_row + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside[:, None] & known[None, :],
    )


def plan_rounded(x: Tensor, group: int) -> Plan[Tensor]:
    """x as `round_to_fp8` rounds it, in its own dtype."""
    out = x.new_empty(x.shape)
    return Plan(out=out, launches=(_round_launch(x, group, out=out),))


def plan_codes(x: Tensor, group: int) -> Plan[tuple[Tensor, Tensor]]:
    """x [rows, K] -> float8 [rows, K] and scales [rows, K / group]."""
    rows, depth = x.shape
    codes = x.new_empty(rows, depth, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(rows, depth // group, dtype=torch.float32)
    launch = _round_launch(x, group, codes=codes.view(torch.uint8), scale=scale)
    return Plan(out=(codes, scale), launches=(launch,))


def _round_launch(
    x: Tensor, group: int, *, codes: Tensor | None = None, scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Launch:  # fmt: skip
    depth = x.shape[-1]
    flat = x.reshape(-1, depth)
    block = power_of_2(group)
    groups = max(1, min(power_of_2(depth // group), _ROUND_ELEMENTS // block))
    return Launch(
        kernel=round_kernel,
        grid=(flat.shape[0], cdiv(depth // group, groups)),
        args={"x": flat, "codes": codes, "scale": scale, "out": out, "x_row": flat.stride(0)},
        constants={
            "K": depth, "GROUP": group, "BLOCK": block, "GROUPS": groups,
            "CODES": codes is not None,
        },
        num_warps=row_warps(block * groups),
    )  # fmt: skip


def plan_rows_of(weight: Tensor) -> Plan[Tensor]:
    """The blocks [N / 16, K / 4, 64] of a weight as rows [N, K]."""
    channels, depth = weight.shape[0] * CHANNELS, weight.shape[1] * 4
    out = weight.new_empty(channels, depth)
    launch = Launch(
        kernel=unblock_kernel,
        grid=(weight.shape[0], cdiv(depth, 2 * WIDE_BLOCK)),
        args={"words": weight.view(torch.int32), "out": out.view(torch.int32)},
        constants={"K": depth, "BLOCK_W": WIDE_BLOCK // 2},
    )
    return Plan(out=out, launches=(launch,))


def plan_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
) -> Plan[Tensor]:
    """out [rows, N] = x w^T + bias, with x and weight in float8 and contiguous."""
    (rows, depth), channels = x.shape, weight.shape[0]
    tiles = scaled_tiles(depth // scale.shape[1], depth)
    launch = Launch(
        kernel=product_kernel,
        grid=(cdiv(rows, tiles.block_m), cdiv(channels, tiles.block_n)),
        args={
            "x": x, "x_scale": x_scale, "weight": weight, "scale": scale, "bias": bias, "out": out,
            "rows": rows, "out_row": out.stride(0),
        },
        constants={
            "N": channels, "K": depth, "GROUP": depth // scale.shape[1],
            "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
            "BIAS": bias is not None,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def scaled_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`quantized_linear` with `x_bits` 8 of an fp8 weight, for many rows."""
    channels, depth = weight.shape[0] * CHANNELS, x.shape[-1]
    flat = x.reshape(-1, depth)
    codes, x_scale = plan_codes(flat, depth // scale.shape[1]).run()
    out = x.new_empty(flat.shape[0], channels)
    by_library = x.dtype == torch.bfloat16 and scale.shape[1] == 1 and library_scales(x.device)
    for start, count in slabs(channels, slab(channels, depth)):
        blocks = slice(start // CHANNELS, (start + count) // CHANNELS)
        columns = slice(start, start + count)
        own = None if bias is None else bias[columns]
        given = codes, x_scale, plan_rows_of(weight[blocks]).run(), scale[blocks], own
        if by_library and count == channels:
            out = library_product(*given)
        elif by_library:
            out[:, columns] = library_product(*given)
        else:
            plan_product(*given, out[:, columns]).run()
    return out.view(*x.shape[:-1], channels)


def library_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """`plan_product` in bfloat16 by the library, for one scale per row and channel. Without its
    fast accumulation, sums are added in float32 every 128 inputs or sooner."""
    product: Tensor = torch._scaled_mm(
        x,
        weight.T,
        scale_a=x_scale,
        scale_b=scale.float().view(1, -1),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return product


def multiplies_codes(device: torch.device) -> bool:
    """Whether the GPU multiplies float8."""
    return interpreted() or converts(device)


def library_scales(device: torch.device) -> bool:
    """Whether the library multiplies float8 with a scale per row and channel on this GPU."""
    return device.type == "cuda" and _library_scales(device.index)


@cache
def _library_scales(index: int | None) -> bool:
    """By trying: it depends on the GPU and on the versions of torch and CUDA. The first call is
    never captured, since every step runs once before it is."""
    device = torch.device("cuda" if index is None else f"cuda:{index}")
    codes = torch.ones(32, 32, device=device).to(torch.float8_e4m3fn)
    ones = torch.ones(2, 1, 16, device=device)
    try:
        got = library_product(codes, ones.view(32, 1), codes, ones, None)
    except (AttributeError, RuntimeError, ValueError):
        return False
    return bool((got == 32).all())
