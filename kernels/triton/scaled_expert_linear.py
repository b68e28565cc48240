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
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.configs import scaled_expert_config
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.expert_linear import chosen_rows, rows_of_tile, tiles_of
from llmc.kernels.triton.launch import Launch, Plan, cdiv
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
    x, x_scale, words, scale, bias, chosen, offsets, out, rows, bias_expert,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [tokens, K] float8, x_scale [tokens, K / GROUP]; words [EXPERTS, N / 16, K / 4, 16] int32,
    scale [.., K / GROUP, 16]. BLOCK_K divides GROUP, unless that is K.

    chosen, offsets: as in `rows_of_tile`. x has a row for CHOICES consecutive results.
    """
    if PDL:
        wait_for_previous()
    expert, row, mine = rows_of_tile(chosen, offsets, rows, ROWS, EXPERTS, EXPERTS_PAD, BLOCK_M)
    if expert > EXPERTS:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    if expert == EXPERTS:
        zeros = tl.zeros([BLOCK_M, BLOCK_N], out.dtype.element_ty)
        tl.store(out + row[:, None] * N + n[None, :], zeros, mask=mine[:, None] & inside[None, :])
        return
    first = expert.to(tl.int64) * (N // 16)
    b_scale = scale + (first + n // 16) * (K // GROUP * 16) + n % 16
    block = tl.program_id(1) * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16)[None, :, None]
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
    if BIAS:
        own = tl.load(bias + expert.to(tl.int64) * bias_expert + n, mask=inside, other=0.0)
        acc += own.to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * N + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=mine[:, None] & inside[None, :],
    )


def plan(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Plan[Tensor]:
    """`quantized_expert_linear` with `x_bits` 8 of an fp8 weight; x [T, K] is rounded first."""
    rows, depth = expert.shape[0], x.shape[1]
    experts, channels = weight.shape[0], weight.shape[1] * CHANNELS
    group = depth // scale.shape[2]
    rounded = plan_codes(x, group)
    codes, x_scale = rounded.out
    config = scaled_expert_config(rows, experts, group, depth)
    given, constants = chosen_rows(x, expert, experts, order, offsets)
    out = x.new_empty(rows, channels)
    pdl = dependent_launch.applies_to(x.device)
    launch = Launch(
        kernel=scaled_expert_kernel,
        grid=(tiles_of(rows, experts, config.block_m), cdiv(channels, config.block_n)),
        args={
            "x": codes, "x_scale": x_scale, "words": weight.view(torch.int32), "scale": scale,
            "bias": bias, **given, "out": out,
            "bias_expert": 0 if bias is None else bias.stride(0),
        },
        constants={
            "N": channels, "K": depth, "GROUP": group, **constants,
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
            "BIAS": bias is not None, "PDL": pdl,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(*rounded.launches, launch))
