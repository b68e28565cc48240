"""`quantized_linear` in Triton: words of 4- or 8-bit values are dequantized in registers.

A program reads blocks of 16 channels as contiguous 32-bit words. One row is multiplied lane by
lane; more rows are multiplied by tensor cores, for which dequantized weights are rounded to x's
dtype, as if they had been stored in it. Deep, narrow weights are split along their depth; the last
program of a tile adds the parts in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.quantized_linear import CHANNELS, EXACT_BITS, groups_of
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.counters import counters, is_last, sum_of_parts
from llmc.kernels.triton.define import (
    interpreted,
    needs_upcast,
    same_dtype,
    supports_tensors,
)
from llmc.kernels.triton.dependent_launch import prefetch, wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, multiprocessors
from llmc.kernels.triton.linear_configs import LinearConfig, low_bit_config

_FORMATS = {torch.uint8: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


def format_of(weight: Tensor, scale: Tensor) -> str | None:
    """The format's name in the kernels; None for a weight that they do not support."""
    return "mxfp4" if scale.dtype == torch.uint8 else _FORMATS.get(weight.dtype)


@triton.jit
def widen(words, shift, FORMAT: tl.constexpr):
    """The value at `shift` bits of each word, float32; int4 as it is stored, 0 to 15."""
    if FORMAT == "int4":
        return ((words >> shift) & 15).to(tl.float32)
    elif FORMAT == "mxfp4":
        bits = words >> shift  # e2m1 is float16 with fewer bits and an exponent 14 lower
        half = ((bits & 8) << 12) | ((bits & 7) << 9)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif FORMAT == "int8":
        return ((words << (24 - shift)) >> 24).to(tl.float32)
    else:
        bits = words >> shift  # e4m3 is float16 with fewer bits and an exponent 8 lower
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def load_scale(
    scale, block, group, lane, known,
    K: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Scales in float32; for mxfp4 2 ** (e - 127), where 0 is subnormal and 255 is NaN. PARTS: 0,
    or those of superblocks: 1, or 2 with minimums."""
    if PARTS > 0:
        return _of_superblock(scale, block, group, lane, known, K, GROUP, PARTS, 0)
    else:
        at = scale + block * (K // GROUP * 16) + group * 16 + lane
        stored = tl.load(at, mask=known, other=0)
        if FORMAT == "mxfp4":
            exponent = stored.to(tl.int32)
            odd = (exponent == 0) | (exponent == 255)
            return (exponent << 23 | tl.where(odd, 0x400000, 0)).to(tl.float32, bitcast=True)
        else:
            return stored.to(tl.float32)


@triton.jit
def load_minimum(
    scale, minimum, block, group, lane, known,
    K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Minimums in float32, from superblocks if `scale` has any."""
    if PARTS > 0:
        return _of_superblock(scale, block, group, lane, known, K, GROUP, PARTS, 1)
    else:
        at = minimum + block * (K // GROUP * 16) + group * 16 + lane
        return tl.load(at, mask=known, other=0.0).to(tl.float32)


@triton.jit
def _of_superblock(
    words, block, group, lane, known,
    K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """Scales, or minimums (part 1): a float16 factor times 8-bit steps, two in a word."""
    STEPS: tl.constexpr = 256 // GROUP
    WORDS: tl.constexpr = PARTS * (1 + STEPS // 2)
    at = words + (block * (K // 256) + group // STEPS) * (WORDS * 16) + lane
    factor = tl.load(at + part * 16, mask=known, other=0).to(tl.float16, bitcast=True)
    step = group % STEPS * PARTS + part
    pair = tl.load(at + (PARTS + step // 2) * 16, mask=known, other=0).to(tl.int32)
    return factor.to(tl.float32) * (pair << (24 - step % 2 * 8) >> 24).to(tl.float32)


def scale_constants(
    scale: Tensor, minimum: Tensor | None, depth: int, kind: str | None
) -> dict[str, object]:
    """The constants with which kernels read the scales and minimums of a weight."""
    groups, is_super = groups_of(scale, depth), scale.dtype == torch.int16
    return {
        "GROUP": groups.size, "FORMAT": kind, "PARTS": 1 + groups.minimum if is_super else 0,
        "MINIMUM": groups.minimum if is_super else minimum is not None,
    }  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def low_bit_kernel(
    x, words, scale, zero, minimum, bias, out, partial, counter, rows, x_row,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """words [N / 16, K / PER, 16] int32; scale, zero, minimum [N / 16, K / GROUP, 16]. PARTS: as in
    `load_scale`."""
    PER: tl.constexpr = 8 if FORMAT == "int4" or FORMAT == "mxfp4" else 4
    BITS: tl.constexpr = 32 // PER
    BLOCK_W: tl.constexpr = BLOCK_K // PER
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = n < N
    block, lane = (n // 16).to(tl.int64), n % 16
    first = tl.program_id(2) * SPLIT_K
    word = words + block * (K // PER * 16) + lane
    if PDL:
        # a block of 16 channels is contiguous: one prefetch per 32 bytes
        ahead = first // PER * 16 + tl.arange(0, BLOCK_W * 2) * 8
        blocks = tl.program_id(1) * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16)
        blocks = tl.minimum(blocks, N // 16 - 1).to(tl.int64) * (K // PER * 16)
        prefetch(words + blocks[None, :] + tl.minimum(ahead, K // PER * 16 - 1)[:, None])
        wait_for_previous()
    j = tl.arange(0, PER)
    if DOT:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([BLOCK_W, BLOCK_N], tl.float32)
    for k0 in tl.range(first, min(first + SPLIT_K, K), BLOCK_K):
        w = k0 // PER + tl.arange(0, BLOCK_W)
        known = (w < K // PER)[:, None] & inside[None, :]
        q = tl.load(word[None, :] + w[:, None] * 16, mask=known, other=0)
        group = (w * PER // GROUP)[:, None]
        factor = load_scale(
            scale, block[None, :], group, lane[None, :], known, K, GROUP, FORMAT, PARTS
        )
        if ZERO:
            at = zero + block[None, :] * (K // GROUP * 16) + group * 16 + lane[None, :]
            offset = tl.load(at, mask=known, other=0).to(tl.float32)
        else:
            middle: tl.constexpr = 8.0 if FORMAT == "int4" and not MINIMUM else 0.0
            offset = tl.full([BLOCK_W, BLOCK_N], middle, tl.float32)
        if MINIMUM:
            least = load_minimum(
                scale, minimum, block[None, :], group, lane[None, :], known, K, GROUP, PARTS
            )
        else:
            least = tl.zeros([BLOCK_W, BLOCK_N], tl.float32)
        if DOT:
            k = k0 + tl.arange(0, BLOCK_K)
            a = tl.load(
                x + m.to(tl.int64)[:, None] * x_row + k[None, :],
                mask=(m < rows)[:, None] & (k < K)[None, :],
                other=0.0,
            )
            values = widen(q[:, None, :], j[None, :, None] * BITS, FORMAT)
            values -= offset[:, None, :]
            values = values * factor[:, None, :] + least[:, None, :]
            b = tl.reshape(values, [BLOCK_K, BLOCK_N]).to(a.dtype)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        else:
            sums = tl.zeros([BLOCK_W, BLOCK_N], tl.float32)
            inputs = tl.zeros([BLOCK_W], tl.float32)
            for i in tl.static_range(PER):
                one = tl.load(x + w * PER + i, mask=w < K // PER, other=0.0).to(tl.float32)
                sums += widen(q, i * BITS, FORMAT) * one[:, None]
                inputs += one
            acc += (sums - offset * inputs[:, None]) * factor + least * inputs[:, None]
    y = acc if DOT else tl.sum(acc, axis=0)[None, :]
    known = (m < rows)[:, None] & inside[None, :]
    row = m.to(tl.int64)[:, None]
    if SPLITS > 1:
        at = partial + row * N + n[None, :]
        tl.store(at + tl.program_id(2) * rows * N, y, mask=known)
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if not is_last(counter + tile, SPLITS):
            return
        y = sum_of_parts(at, rows * N, known, SPLITS)
    if BIAS:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row * N + n[None, :], y.to(out.dtype.element_ty), mask=known)


def plan(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    minimum: Tensor | None = None,
) -> Plan[Tensor]:
    kind = format_of(weight, scale)
    per_word = 8 if weight.dtype == torch.uint8 else 4
    depth, channels = weight.shape[1] * per_word, weight.shape[0] * CHANNELS
    flat = x.reshape(-1, depth)
    rows = flat.shape[0]
    processors = 3 if interpreted() else multiprocessors(x.device)
    config = low_bit_config(rows, channels, depth, per_word, processors, x.element_size())
    tiles = config.tiles
    out = x.new_empty(*x.shape[:-1], channels)
    pdl = dependent_launch.applies_to(x.device)
    partial = x.new_empty(config.splits, rows, channels, dtype=torch.float32)
    grid = (cdiv(rows, tiles.block_m), cdiv(channels, tiles.block_n), config.splits)
    launch = Launch(
        kernel=low_bit_kernel,
        grid=grid,
        args={
            "x": flat, "words": weight.view(torch.int32), "scale": scale, "zero": zero,
            "minimum": minimum, "bias": bias, "out": out, "partial": partial,
            "counter": counters(x.device, grid[0] * grid[1]), "rows": rows,
            "x_row": flat.stride(0),
        },
        constants={
            "N": channels, "K": depth, **scale_constants(scale, minimum, depth, kind),
            **_tiles(config), "ZERO": zero is not None, "BIAS": bias is not None,
            "DOT": rows > 1, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "UPCAST": needs_upcast(x.dtype), "PDL": pdl,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def _tiles(config: LinearConfig) -> dict[str, int]:
    return {
        "SPLITS": config.splits, "SPLIT_K": config.split_k, "BLOCK_M": config.tiles.block_m,
        "BLOCK_N": config.tiles.block_n, "BLOCK_K": config.tiles.block_k,
    }  # fmt: skip


def supports(
    *, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, x_bits: int, **others: object
) -> bool:
    return (
        supports_tensors(x, bias)
        and (x_bits == EXACT_BITS or weight.dtype == torch.float8_e4m3fn)
        and same_dtype(x, bias)
        and format_of(weight, scale) is not None
        and weight.device.type == x.device.type
        and weight.is_contiguous()
    )
