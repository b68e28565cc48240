"""`quantized_linear` in Triton: words of 4- to 8-bit values are dequantized in registers.

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

from llmc.kernels.quantized_linear import (
    CHANNELS,
    EXACT_BITS,
    LINE,
    MIDDLES,
    TABLES,
    Format,
    groups_of,
    inputs_of,
    packed_format,
)
from llmc.kernels.triton import dependent_launch, norm
from llmc.kernels.triton.act_mul import activated
from llmc.kernels.triton.counters import counters, is_last, sum_of_parts
from llmc.kernels.triton.define import (
    dot_precision,
    needs_upcast,
    same_dtype,
    supports_tensors,
)
from llmc.kernels.triton.dependent_launch import prefetch, wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, multiprocessors
from llmc.kernels.triton.linear_configs import LinearConfig, low_bit_config
from llmc.kernels.triton.norm import (
    centered_inputs,
    factor_of_rows,
    mean_and_factor,
    sum_with_norm,
)

_FORMATS: dict[torch.dtype, Format] = {
    torch.uint8: "int4",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}


def _bytes(format: Format, half: int, scale: int = 1) -> tl.constexpr:
    """Eight values of a table times `scale`, the first one in the lowest byte: of codes 0 to 7, or
    (`half` is 1) 8 to 15."""
    values = [int(value * scale) & 0xFF for value in TABLES[format][8 * half : 8 * half + 8]]
    return tl.constexpr(int.from_bytes(values, "little", signed=True))


_IQ4_LOW, _IQ4_HIGH = _bytes("iq4", 0), _bytes("iq4", 1)
_IQ3_S_LOW, _IQ3_S_HIGH = _bytes("iq3_s", 0), _bytes("iq3_s", 1)
_IQ3_XXS_LOW, _IQ3_XXS_HIGH = _bytes("iq3_xxs", 0, 2), _bytes("iq3_xxs", 1, 2)
_IQ2_LOW, _IQ2_HIGH = _bytes("iq2", 0, 8), _bytes("iq2", 1, 8)


def format_of(weight: Tensor, scale: Tensor) -> Format | None:
    """The format's name in the kernels; None for a weight that they do not support."""
    if scale.dtype == torch.uint8:
        return "mxfp4"
    return packed_format(weight) or _FORMATS.get(weight.dtype)


def per_word(kind: Format | None) -> int:
    """Inputs in a word of `load_block`."""
    return 8 if kind == "int4" or kind in TABLES else 4


@triton.jit
def load_block(
    at, first, known,
    K: tl.constexpr, BLOCK_W: tl.constexpr, FORMAT: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Words [BLOCK_W, N] of PER inputs each, from word `first` on. at [1, N]: the first word of
    each channel in its block. Values of int5 and int6 become bytes."""
    if FORMAT == "int6":
        unit = (first // 4 + tl.arange(0, BLOCK_W // 4))[:, None]
        here = (unit < K // 16) & known
        a = tl.load(at + unit * 48, mask=here, other=0)
        b = tl.load(at + unit * 48 + 16, mask=here, other=0)
        c = tl.load(at + unit * 48 + 32, mask=here, other=0)
        four = tl.join(
            tl.join(a & 0x3F3F3F3F, b & 0x3F3F3F3F), tl.join(c & 0x3F3F3F3F, _last_of_6(a, b, c))
        )
        return tl.reshape(tl.permute(four, (0, 3, 2, 1)), [BLOCK_W, at.shape[1]])
    elif FORMAT == "int5":
        unit = (first // 8 + tl.arange(0, BLOCK_W // 8))[:, None]
        here = (unit < K // 32) & known
        a = tl.load(at + unit * 80, mask=here, other=0)
        b = tl.load(at + unit * 80 + 16, mask=here, other=0)
        c = tl.load(at + unit * 80 + 32, mask=here, other=0)
        d = tl.load(at + unit * 80 + 48, mask=here, other=0)
        e = tl.load(at + unit * 80 + 64, mask=here, other=0)
        low = tl.join(
            tl.join(a & 0x1F1F1F1F, b & 0x1F1F1F1F), tl.join(c & 0x1F1F1F1F, d & 0x1F1F1F1F)
        )
        high = tl.join(
            tl.join(e & 0x1F1F1F1F, _both_of_5(a, b)),
            tl.join(_both_of_5(c, d), _last_of_5(b, d, e)),
        )
        eight = tl.permute(tl.join(low, high), (0, 4, 3, 2, 1))
        return tl.reshape(eight, [BLOCK_W, at.shape[1]])
    else:
        w = (first + tl.arange(0, BLOCK_W))[:, None]
        return tl.load(at + w * 16, mask=(w < K // PER) & known, other=0)


@triton.jit
def load_word(at, w, known, FORMAT: tl.constexpr):
    """The word `w` of PER inputs, for tensors of any shape."""
    if FORMAT == "int6":
        unit, i = at + w // 4 * 48, w % 4
        own = tl.load(unit + tl.minimum(i, 2) * 16, mask=known, other=0)
        a = tl.load(unit, mask=known & (i == 3), other=0)
        b = tl.load(unit + 16, mask=known & (i == 3), other=0)
        return tl.where(i == 3, _last_of_6(a, b, own), own & 0x3F3F3F3F)
    elif FORMAT == "int5":
        unit, i = at + w // 8 * 80, w % 8
        # for the last three: lines 0 and 1, 2 and 3, or 4 and both of the others
        own = tl.load(unit + tl.where(i < 5, i, (i - 5) * 2) * 16, mask=known, other=0)
        b = tl.load(unit + tl.where(i == 6, 3, 1) * 16, mask=known & (i >= 5), other=0)
        d = tl.load(unit + 48, mask=known & (i == 7), other=0)
        pair = tl.where(i == 7, _last_of_5(b, d, own), _both_of_5(own, b))
        return tl.where(i < 5, own & 0x1F1F1F1F, pair)
    else:
        return tl.load(at + w * 16, mask=known, other=0)


@triton.jit
def _last_of_6(a, b, c):
    return ((a >> 6) & 0x03030303) | ((b >> 4) & 0x0C0C0C0C) | ((c >> 2) & 0x30303030)


@triton.jit
def _both_of_5(a, b):
    return ((a >> 5) & 0x07070707) | ((b >> 2) & 0x18181818)


@triton.jit
def _last_of_5(b, d, e):
    return ((e >> 5) & 0x07070707) | ((b >> 4) & 0x08080808) | ((d >> 3) & 0x10101010)


@triton.jit
def widen(words, shift, FORMAT: tl.constexpr):
    """The value at `shift` bits of each word, float32; integers of less than 8 bits as stored."""
    if FORMAT == "int5" or FORMAT == "int6":
        return ((words >> shift) & 63).to(tl.float32)
    elif FORMAT == "int4":
        return ((words >> shift) & 15).to(tl.float32)
    elif FORMAT == "iq4":
        return _look_up(words >> shift, _IQ4_LOW, _IQ4_HIGH)
    elif FORMAT == "iq3_s":
        return _look_up(words >> shift, _IQ3_S_LOW, _IQ3_S_HIGH)
    elif FORMAT == "iq3_xxs":
        return _look_up(words >> shift, _IQ3_XXS_LOW, _IQ3_XXS_HIGH) * 0.5
    elif FORMAT == "iq2":
        return _look_up(words >> shift, _IQ2_LOW, _IQ2_HIGH) * 0.125
    elif FORMAT == "mxfp4" or FORMAT == "nvfp4":
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
def _look_up(bits, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The signed byte of the code in the lowest four bits: see `_bytes`."""
    code = bits & 15
    eight = tl.where(code > 7, HIGH, LOW)
    return (eight >> ((code & 7) * 8)).to(tl.int8).to(tl.float32)


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


def weight_constants(
    weight: Tensor, scale: Tensor, minimum: Tensor | None, depth: int
) -> dict[str, object]:
    """The constants with which kernels read a weight, its scales and minimums."""
    kind = format_of(weight, scale)
    groups, is_super = groups_of(scale, depth), scale.dtype == torch.int16
    has_minimum = groups.minimum if is_super else minimum is not None
    middle = MIDDLES.get(kind, 0) if kind and not has_minimum else 0
    return {
        "GROUP": groups.size, "FORMAT": kind, "PARTS": 1 + groups.minimum if is_super else 0,
        "MINIMUM": has_minimum, "WORDS": weight.shape[-2] * weight.shape[-1] // LINE,
        "MIDDLE": float(middle), "PER": per_word(kind),
    }  # fmt: skip


@triton.jit
def load_weights(
    words, scale, zero, minimum, block, lane, first, inside,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_W: tl.constexpr, FORMAT: tl.constexpr,
    PER: tl.constexpr, WORDS: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr,
    MINIMUM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Words [BLOCK_W, N] from word `first` on, and their scales, zero points and minimums in
    float32. block, lane, inside [N]: where each channel is, and whether it exists."""
    q = load_block(
        (words + block * WORDS + lane)[None, :], first, inside[None, :], K, BLOCK_W, FORMAT, PER
    )
    w = first + tl.arange(0, BLOCK_W)
    known = (w < K // PER)[:, None] & inside[None, :]
    block, group, lane = block[None, :], (w * PER // GROUP)[:, None], lane[None, :]
    factor = load_scale(scale, block, group, lane, known, K, GROUP, FORMAT, PARTS)
    if ZERO:
        at = zero + block * (K // GROUP * 16) + group * 16 + lane
        offset = tl.load(at, mask=known, other=0).to(tl.float32)
    else:
        offset = tl.full(known.shape, MIDDLE, tl.float32)
    if MINIMUM:
        least = load_minimum(scale, minimum, block, group, lane, known, K, GROUP, PARTS)
    else:
        least = tl.zeros(known.shape, tl.float32)
    return q, factor, offset, least


@triton.jit
def multiplied(
    acc, a, q, factor, offset, least,
    BLOCK_K: tl.constexpr, PER: tl.constexpr, FORMAT: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """acc + a [BLOCK_M, BLOCK_K] times the values of words q [BLOCK_W, N], by tensor cores."""
    shift = tl.arange(0, PER)[None, :, None] * (32 // PER)
    values = widen(q[:, None, :], shift, FORMAT)
    values -= offset[:, None, :]
    values = values * factor[:, None, :] + least[:, None, :]
    b = tl.reshape(values, [BLOCK_K, q.shape[1]]).to(a.dtype)
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["rows"])
def low_bit_kernel(
    x, words, scale, zero, minimum, bias, norm_weight, norm_bias, residual, before, x_weight, out,
    total_out, partial, squares, counter, rows, x_row, residual_row, before_row, eps, norm_offset,
    x_eps, x_offset,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr, PER: tl.constexpr, WORDS: tl.constexpr, MIDDLE: tl.constexpr,
    ZERO: tl.constexpr, MINIMUM: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, WEIGHTED: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    CENTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """words [N / 16, WORDS] int32; scale, zero, minimum [N / 16, K / GROUP, 16]. PARTS: as in
    `load_scale`. If an ACT is GATED, gates [N] come first, and as many channels that they multiply.
    partial [SPLITS, rows, N or 2 N]; squares [SPLITS, tiles, rows], with a NORM, for which there
    is one tile of rows, as with a layer_norm (CENTERED, without NORM), and with a sum of `before`
    and of rms_norm(x), which the programs of the first channels store in total_out [rows, K]."""
    BITS: tl.constexpr = 32 // PER
    BLOCK_W: tl.constexpr = BLOCK_K // PER
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = n < N
    block, lane = (n // 16).to(tl.int64), n % 16
    first = tl.program_id(2) * SPLIT_K
    if PDL:
        # a block of 16 channels is contiguous: one prefetch per 32 bytes
        ahead = first // 32 * (WORDS // (K // 32)) + tl.arange(0, BLOCK_W * 2) * 8
        blocks = tl.program_id(1) * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16)
        blocks = tl.minimum(blocks, N // 16 - 1).to(tl.int64) * WORDS
        prefetch(words + blocks[None, :] + tl.minimum(ahead, WORDS - 1)[:, None])
        wait_for_previous()
    if DOT:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([BLOCK_W, BLOCK_N], tl.float32)
        up_acc = tl.zeros([BLOCK_W, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if CENTERED:
        mean, scaled = mean_and_factor(x, x_row, rows, eps, K, BLOCK_M, BLOCK_K)
    if before is not None:
        stores_sum = tl.program_id(1) == 0
        x_factor = factor_of_rows(x, x_row, rows, x_eps, K, BLOCK_M, BLOCK_K)
    for k0 in tl.range(first, min(first + SPLIT_K, K), BLOCK_K):
        w = k0 // PER + tl.arange(0, BLOCK_W)
        q, factor, offset, least = load_weights(
            words, scale, zero, minimum, block, lane, k0 // PER, inside,
            K, GROUP, BLOCK_W, FORMAT, PER, WORDS, MIDDLE, ZERO, MINIMUM, PARTS,
        )  # fmt: skip
        if GATED:
            up, up_factor, up_offset, up_least = load_weights(
                words, scale, zero, minimum, block + N // 16, lane, k0 // PER, inside,
                K, GROUP, BLOCK_W, FORMAT, PER, WORDS, MIDDLE, ZERO, MINIMUM, PARTS,
            )  # fmt: skip
        if DOT:
            k = k0 + tl.arange(0, BLOCK_K)
            a = tl.load(
                x + m.to(tl.int64)[:, None] * x_row + k[None, :],
                mask=(m < rows)[:, None] & (k < K)[None, :],
                other=0.0,
            )
            if before is not None:
                here = (m < rows)[:, None] & (k < K)[None, :]
                more = tl.load(before + m[:, None] * before_row + k[None, :], mask=here, other=0.0)
                a = sum_with_norm(a, x_factor[:, None], more, x_weight, x_offset, k, k < K)
                tl.store(total_out + m[:, None] * K + k[None, :], a, mask=here & stores_sum)
            if CENTERED:
                normed = centered_inputs(
                    a, mean, scaled, norm_weight, norm_bias, k, k < K, WEIGHTED
                )
                a = normed.to(a.dtype)
            if NORM:
                wide = a.to(tl.float32)
                total += tl.sum(wide * wide, axis=1)
                if WEIGHTED:
                    gain = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
                    wide *= (gain + norm_offset)[None, :]
                a = wide.to(a.dtype)
            acc = multiplied(
                acc, a, q, factor, offset, least, BLOCK_K, PER, FORMAT, PRECISION, UPCAST
            )
            if GATED:
                up_acc = multiplied(
                    up_acc, a, up, up_factor, up_offset, up_least,
                    BLOCK_K, PER, FORMAT, PRECISION, UPCAST,
                )  # fmt: skip
        else:
            sums = tl.zeros([BLOCK_W, BLOCK_N], tl.float32)
            up_sums = tl.zeros([BLOCK_W, BLOCK_N], tl.float32)
            inputs = tl.zeros([BLOCK_W], tl.float32)
            square = tl.zeros([BLOCK_W], tl.float32)
            for i in tl.static_range(PER):
                reached = w < K // PER
                one = tl.load(x + w * PER + i, mask=reached, other=0.0)
                if before is not None:
                    k = w * PER + i
                    more = tl.load(before + k, mask=reached, other=0.0)
                    scaled = tl.sum(x_factor, axis=0)
                    one = sum_with_norm(one, scaled, more, x_weight, x_offset, k, reached)
                    tl.store(total_out + k, one, mask=reached & stores_sum)
                one = one.to(tl.float32)
                if CENTERED:
                    # a vector: as a tile of one row, it would take up to twice the registers
                    one = (one - tl.sum(mean, axis=0)) * tl.sum(scaled, axis=0)
                    if WEIGHTED:
                        gain = tl.load(norm_weight + w * PER + i, mask=reached, other=0.0)
                        one *= gain.to(tl.float32)
                    if norm_bias is not None:
                        shift = tl.load(norm_bias + w * PER + i, mask=reached, other=0.0)
                        one += shift.to(tl.float32)
                if NORM:
                    square += one * one
                    if WEIGHTED:
                        gain = tl.load(norm_weight + w * PER + i, mask=reached, other=0.0)
                        one *= gain.to(tl.float32) + norm_offset
                sums += widen(q, i * BITS, FORMAT) * one[:, None]
                if GATED:
                    up_sums += widen(up, i * BITS, FORMAT) * one[:, None]
                inputs += one
            acc += (sums - offset * inputs[:, None]) * factor + least * inputs[:, None]
            if GATED:
                up_acc += (up_sums - up_offset * inputs[:, None]) * up_factor
                up_acc += up_least * inputs[:, None]
            if NORM:
                total += tl.sum(square, axis=0)
    y = acc if DOT else tl.sum(acc, axis=0)[None, :]
    up = up_acc if DOT else tl.sum(up_acc, axis=0)[None, :]
    known = (m < rows)[:, None] & inside[None, :]
    row = m.to(tl.int64)[:, None]
    if SPLITS > 1:
        WIDTH: tl.constexpr = 2 * N if GATED else N
        at = partial + row * WIDTH + n[None, :]
        own = tl.program_id(2) * rows * WIDTH
        tl.store(at + own, y, mask=known)
        if GATED:
            tl.store(at + N + own, up, mask=known)
        tiles = tl.num_programs(1)
        squares_at = squares
        if NORM:
            squares_at = squares + tl.program_id(1) * rows + m
            tl.store(squares_at + tl.program_id(2) * tiles * rows, total, mask=m < rows)
        tile = tl.program_id(0) * tiles + tl.program_id(1)
        if not is_last(counter + tile, SPLITS):
            return
        y = sum_of_parts(at, rows * WIDTH, known, SPLITS)
        if GATED:
            up = sum_of_parts(at + N, rows * WIDTH, known, SPLITS)
        if NORM:
            total = sum_of_parts(squares_at, tiles * rows, m < rows, SPLITS)
    if NORM:
        of_row = (1 / tl.sqrt_rn(total / K + eps))[:, None]
        y *= of_row
        up *= of_row
    if BIAS:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACT is not None:
        y = activated(y, ACT)
    if GATED:
        y *= up
    if ADD:
        more = tl.load(residual + row * residual_row + n[None, :], mask=known, other=0.0)
        y += more.to(tl.float32)
    tl.store(out + row * N + n[None, :], y.to(out.dtype.element_ty), mask=known)


def plan(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    minimum: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    offset: float = 0.0,
    act: str | None = None,
    residual: Tensor | None = None,
    gated: bool = True,
    centered: bool = False,
    norm_bias: Tensor | None = None,
) -> Plan[Tensor]:
    """With a norm, for up to FUSED_ROWS rows."""
    depth, gated = inputs_of(weight), gated and act is not None
    channels = weight.shape[0] * CHANNELS // (2 if gated else 1)
    flat = x.reshape(-1, depth)
    rows = flat.shape[0]
    more = None if residual is None else residual.reshape(rows, channels)
    processors = multiprocessors(x.device)
    config = low_bit_config(
        rows, channels, depth, per_word(format_of(weight, scale)), processors, x.element_size(),
        gated,
    )  # fmt: skip
    tiles = config.tiles
    out = x.new_empty(*x.shape[:-1], channels)
    pdl = dependent_launch.applies_to(x.device)
    partial = squares = None
    grid = (cdiv(rows, tiles.block_m), cdiv(channels, tiles.block_n), config.splits)
    if config.splits > 1:  # of an output head, for many rows, it would be hundreds of megabytes
        partial = x.new_empty(config.splits, rows, weight.shape[0] * CHANNELS, dtype=torch.float32)
        if eps is not None and not centered:
            squares = x.new_empty(config.splits, grid[1], rows, dtype=torch.float32)
    launch = Launch(
        kernel=low_bit_kernel,
        grid=grid,
        args={
            "x": flat, "words": weight.view(torch.int32), "scale": scale, "zero": zero,
            "minimum": minimum, "bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias,
            "residual": more, "out": out, "partial": partial, "squares": squares,
            "counter": counters(x.device, grid[0] * grid[1]), "rows": rows,
            "x_row": flat.stride(0), "residual_row": 0 if more is None else more.stride(0),
            "eps": eps or 0.0, "norm_offset": offset, **norm.NO_SUM,
        },
        constants={
            "N": channels, "K": depth, **weight_constants(weight, scale, minimum, depth),
            **_tiles(config), "ZERO": zero is not None, "BIAS": bias is not None,
            "NORM": eps is not None and not centered, "WEIGHTED": norm_weight is not None,
            "ACT": act, "GATED": gated, "ADD": more is not None, "DOT": rows > 1,
            "PRECISION": dot_precision(x.dtype), "UPCAST": needs_upcast(x.dtype),
            "CENTERED": centered, "PDL": pdl,
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
