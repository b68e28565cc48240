"""`quantized_expert_linear` of fp8 weights with inputs in fp8, on GPUs that multiply float8.

As in scaled_linear.py, tensor cores multiply the codes, and each group's sum is scaled in float32.
A word of the weight is four codes of a channel in the order in which they are multiplied. So any
number of rows reads the weight as it is stored, and nothing is dequantized. (For tiles of 16 rows,
Triton converts codes to float16, which holds each exactly.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.quantized_linear import CHANNELS
from llmc.kernels.triton.configs import scaled_expert_config
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.expert_linear import (
    UNGATED,
    Gate,
    Sum,
    channels_of_tile,
    plan_tiles,
    rows_of_tile,
    store_sums,
    store_zeros,
    sum_if_last,
)
from llmc.kernels.triton.launch import Plan
from llmc.kernels.triton.scaled_linear import plan_codes


@triton.jit
def codes_of(words, CHANNELS: tl.constexpr, DEPTH: tl.constexpr):
    """[DEPTH / 4, CHANNELS / 16, 16] int32 -> the float8 [DEPTH, CHANNELS] in them.

    Joined, a word's codes stay in one thread, which stores them to shared memory together.
    """
    even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    odd = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
    codes = tl.permute(tl.join(even, odd), (1, 2, 0, 3, 4))
    return tl.trans(tl.reshape(codes, [CHANNELS, DEPTH]).to(tl.float8e4nv, bitcast=True))


@triton.jit(do_not_specialize=["rows"])
def scaled_expert_kernel(
    x, x_scale, words, scale, bias, chosen, offsets, out, share, residual, total, counter, rows,
    bias_expert, residual_row,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    INTERLEAVED: tl.constexpr, COUNT: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [tokens, K] float8, x_scale [tokens, K / GROUP]; words [EXPERTS, N / 16, K / 4, 16] int32,
    scale [.., K / GROUP, 16]. BLOCK_K divides GROUP, unless that is K. With an ACT
    whose gates are a half, 32 divides N.

    chosen, offsets: as in `rows_of_tile`. x has a row for CHOICES consecutive results. share,
    residual, total, counter, COUNT and TOKENS: as in `sum_if_last`.
    """
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
    first = expert.to(tl.int64) * (N // 16)
    b_scale = scale + (first + n // 16) * (K // GROUP * 16) + n % 16
    block = channels_of_tile(tl.program_id(1), N // 16, BLOCK_N // 16, ACT, INTERLEAVED)
    block = block[None, :, None]
    word = words + (first + block) * (K // 4 * 16) + tl.arange(0, 16)[None, None, :]
    token = row // CHOICES
    a_row = x + token[:, None] * K
    a_scale = x_scale + token * (K // GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        w = k0 // 4 + tl.arange(0, BLOCK_K // 4)[:, None, None]
        a = tl.load(a_row + k[None, :], mask=mine[:, None] & (k < K)[None, :], other=0.0)
        q = tl.load(word + w * 16, mask=(block < N // 16) & (w < K // 4), other=0)
        b = codes_of(q, BLOCK_N, BLOCK_K)
        # Hopper's tensor cores drop low bits of longer sums: each step's is added in float32
        if GROUP == K:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
        else:
            part = tl.dot(a, b, max_num_imprecise_acc=BLOCK_K)
            of_rows = tl.load(a_scale + k0 // GROUP, mask=mine, other=0.0)
            of_channels = tl.load(b_scale + k0 // GROUP * 16, mask=inside, other=0.0)
            acc += part * (of_rows[:, None] * of_channels.to(tl.float32)[None, :])
    if GROUP == K:
        of_rows = tl.load(a_scale, mask=mine, other=0.0)
        of_channels = tl.load(b_scale, mask=inside, other=0.0).to(tl.float32)
        acc *= of_rows[:, None] * of_channels[None, :]
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
    bias: Tensor | None,
    expert: Tensor,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
    gate: Gate = UNGATED,
    sums: Sum | None = None,
) -> Plan[Tensor]:
    """`quantized_expert_linear` with `x_bits` 8 of an fp8 weight; x [T, K] is rounded first."""
    experts, depth = weight.shape[0], x.shape[1]
    group = depth // scale.shape[2]
    rounded = plan_codes(x, group)
    codes, x_scale = rounded.out
    product = plan_tiles(
        scaled_expert_kernel,
        scaled_expert_config(expert.shape[0], experts, group, depth),
        x, bias, expert, order, offsets, gate, sums,
        experts=experts, channels=weight.shape[1] * CHANNELS,
        args={
            "x": codes, "x_scale": x_scale, "words": weight.view(torch.int32), "scale": scale,
        },
        constants={"GROUP": group},
    )  # fmt: skip
    return Plan(out=product.out, launches=(*rounded.launches, *product.launches))
