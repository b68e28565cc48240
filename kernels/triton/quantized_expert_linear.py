"""`quantized_expert_linear` in Triton: the grouped product of `expert_linear` over the words of
`quantized_linear`, which are dequantized in registers and rounded to x's dtype. Inputs in fp8 are
multiplied as codes where the GPU can (scaled_expert_linear.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import CHANNELS, EXACT_BITS
from llmc.kernels.sum_expert_linear import sum_quantized_expert_linear
from llmc.kernels.triton import choose_experts, scaled_expert_linear
from llmc.kernels.triton.configs import low_bit_expert_config
from llmc.kernels.triton.define import define, dot_precision, needs_upcast
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.expert_linear import (
    Sum,
    channels_of_tile,
    plan_tiles,
    rows_of_tile,
    store_sums,
    store_zeros,
    sum_if_last,
)
from llmc.kernels.triton.launch import Launch, Plan
from llmc.kernels.triton.quantized_linear import (
    load_block,
    load_minimum,
    load_scale,
    supports,
    weight_constants,
    widen,
)
from llmc.kernels.triton.scaled_linear import multiplies_codes, plan_rounded


@triton.jit(do_not_specialize=["rows"])
def low_bit_expert_kernel(
    x, words, scale, zero, minimum, bias, chosen, offsets, out, share, residual, total, counter,
    rows, x_row, bias_expert, residual_row,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr, WORDS: tl.constexpr, MIDDLE: tl.constexpr, PER: tl.constexpr,
    ZERO: tl.constexpr, MINIMUM: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, INTERLEAVED: tl.constexpr,
    COUNT: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """words [EXPERTS, N / 16, WORDS] int32; scale, zero, minimum [.., K / GROUP, 16].

    chosen, offsets: as in `rows_of_tile`. PARTS: as in `load_scale`. x has a row for CHOICES
    consecutive results. share, residual, total, counter, COUNT and TOKENS: as in `sum_if_last`.
    """
    BITS: tl.constexpr = 32 // PER
    BLOCK_W: tl.constexpr = BLOCK_K // PER
    if PDL:
        wait_for_previous()
    expert, row, mine, tiles = rows_of_tile(
        chosen, offsets, rows, ROWS, EXPERTS, EXPERTS_PAD, BLOCK_M
    )
    if expert > EXPERTS:
        return
    n = channels_of_tile(tl.program_id(1), N, BLOCK_N, ACT, INTERLEAVED)
    inside = n < N
    if expert == EXPERTS:
        store_zeros(out, row, mine, N, BLOCK_N, ACT)
        sum_if_last(
            out, share, residual, total, counter, tiles, rows, residual_row, N, BLOCK_N,
            COUNT, TOKENS,
        )  # fmt: skip
        return
    block, lane = expert.to(tl.int64) * (N // 16) + n // 16, n % 16
    word = words + block * WORDS + lane
    j = tl.arange(0, PER)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        w = k0 // PER + tl.arange(0, BLOCK_W)
        known = (w < K // PER)[:, None] & inside[None, :]
        q = load_block(word[None, :], k0 // PER, inside[None, :], K, BLOCK_W, FORMAT, PER)
        group = (w * PER // GROUP)[:, None]
        factor = load_scale(
            scale, block[None, :], group, lane[None, :], known, K, GROUP, FORMAT, PARTS
        )
        values = widen(q[:, None, :], j[None, :, None] * BITS, FORMAT)
        if ZERO:
            at = zero + block[None, :] * (K // GROUP * 16) + group * 16 + lane[None, :]
            values -= tl.load(at, mask=known, other=0).to(tl.float32)[:, None, :]
        else:
            values -= MIDDLE
        values *= factor[:, None, :]
        if MINIMUM:
            least = load_minimum(
                scale, minimum, block[None, :], group, lane[None, :], known, K, GROUP, PARTS
            )
            values += least[:, None, :]
        k = k0 + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + (row // CHOICES)[:, None] * x_row + k[None, :],
            mask=mine[:, None] & (k < K)[None, :],
            other=0.0,
        )
        b = tl.reshape(values, [BLOCK_K, BLOCK_N]).to(a.dtype)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    store_sums(
        acc, bias, expert, bias_expert, out, row, n, mine, N, BIAS, ACT, LIMIT, SHIFT, INTERLEAVED
    )
    sum_if_last(
        out, share, residual, total, counter, tiles, rows, residual_row, N, BLOCK_N, COUNT, TOKENS
    )


def plan(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    expert: Tensor,
    minimum: Tensor | None = None,
    x_bits: int = EXACT_BITS,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
    act: str | None = None,
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
    sums: Sum | None = None,
) -> Plan[Tensor]:
    gate = act, limit, shift, interleaved
    rounding: tuple[Launch, ...] = ()
    # the kernel for codes reads whole blocks of channels, of each half
    whole = act is None or interleaved or weight.shape[1] % 2 == 0
    if x_bits < EXACT_BITS and whole and multiplies_codes(x.device):
        return scaled_expert_linear.plan(x, weight, scale, bias, expert, order, offsets, gate, sums)
    if x_bits < EXACT_BITS:
        rounded = plan_rounded(x, x.shape[1] // scale.shape[2])
        x, rounding = rounded.out, rounded.launches
    experts = weight.shape[0]
    product = plan_tiles(
        low_bit_expert_kernel,
        low_bit_expert_config(expert.shape[0], experts, x.element_size()),
        x, bias, expert, order, offsets, gate, sums,
        experts=experts, channels=weight.shape[1] * CHANNELS,
        args={
            "x": x, "words": weight.view(torch.int32), "scale": scale, "zero": zero,
            "minimum": minimum, "x_row": x.stride(0),
        },
        constants={
            **weight_constants(weight, scale, minimum, x.shape[1]),
            "ZERO": zero is not None,
            "PRECISION": dot_precision(x.dtype),
            "UPCAST": needs_upcast(x.dtype),
        },
    )  # fmt: skip
    return Plan(out=product.out, launches=(*rounding, *product.launches))


def plan_sum(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    expert: Tensor,
    share: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    minimum: Tensor | None = None,
    x_bits: int = EXACT_BITS,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Plan[Tensor]:
    sums = Sum(share=share, dtype=dtype, residual=residual)
    return plan(x, weight, scale, zero, bias, expert, minimum, x_bits, order, offsets, sums=sums)


def _supports_sum(*, share: Tensor, residual: Tensor | None, **product: Any) -> bool:
    return supports(**product) and choose_experts.supports_sum(share, residual)


define(quantized_expert_linear, plan=plan, supports=supports)
define(sum_quantized_expert_linear, plan=plan_sum, supports=_supports_sum)
