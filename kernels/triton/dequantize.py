"""A quantized weight for the library: dequantized once, not once per tile of rows.

The scratch holds some channels at a time, so an output head does not need one of its own size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.quantized_linear import CHANNELS
from llmc.kernels.triton.launch import Launch, Plan, cdiv
from llmc.kernels.triton.linear_configs import WIDE_BLOCK, WIDE_BYTES
from llmc.kernels.triton.quantized_linear import (
    load_block,
    load_minimum,
    load_scale,
    weight_constants,
    widen,
)


@triton.jit
def dequantize_kernel(
    words, scale, zero, minimum, out,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr, PARTS: tl.constexpr,
    WORDS: tl.constexpr, MIDDLE: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """words [.., WORDS] int32; scale, zero, minimum [.., K / GROUP, 16] -> out [.. * 16, K].
    PARTS: as in `load_scale`.

    A program reads words of one block of 16 channels, which are contiguous, and writes a segment of
    each channel, which is contiguous too.
    """
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 16)[:, None]
    first = tl.program_id(1) * (BLOCK_K // PER)
    at = words + block * WORDS + tl.arange(0, 16)[None, :]
    q = tl.trans(load_block(at, first, True, K, BLOCK_K // PER, FORMAT, PER))
    w = first + tl.arange(0, BLOCK_K // PER)[None, :]
    known = w < K // PER
    shift = tl.arange(0, PER)[None, None, :] * (32 // PER)
    values = widen(q[:, :, None], shift, FORMAT)
    if FORMAT == "fp8":
        values = tl.where((q[:, :, None] >> shift & 0x7F) == 0x7F, float("nan"), values)
    group = w * PER // GROUP
    if ZERO:
        at = zero + block * (K // GROUP * 16) + group * 16 + lane
        values -= tl.load(at, mask=known, other=0).to(tl.float32)[:, :, None]
    else:
        values -= MIDDLE
    factor = load_scale(scale, block, group, lane, known, K, GROUP, FORMAT, PARTS)
    values *= factor[:, :, None]
    if MINIMUM:
        least = load_minimum(scale, minimum, block, group, lane, known, K, GROUP, PARTS)
        values += least[:, :, None]
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    row = tl.reshape(values, [16, BLOCK_K]).to(out.dtype.element_ty)
    tl.store(out + (block * 16 + lane) * K + k, row, mask=k < K)


def plan(
    weight: Tensor, scale: Tensor, zero: Tensor | None, minimum: Tensor | None, out: Tensor
) -> Plan[Tensor]:
    """out [N, K] from the parts of a weight of `quantized_linear`."""
    depth = out.shape[1]
    launch = Launch(
        kernel=dequantize_kernel,
        grid=(weight.shape[0], cdiv(depth, WIDE_BLOCK)),
        args={
            "words": weight.view(torch.int32), "scale": scale, "zero": zero, "minimum": minimum,
            "out": out,
        },
        constants={
            "K": depth, **weight_constants(weight, scale, minimum, depth),
            "BLOCK_K": WIDE_BLOCK, "ZERO": zero is not None,
        },
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def wide_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    minimum: Tensor | None,
) -> Tensor:
    """`quantized_linear` for many rows: weights are rounded to x's dtype, as in its other kernels,
    and the library multiplies."""
    channels, depth = weight.shape[0] * CHANNELS, x.shape[-1]
    step = slab(channels, depth * x.element_size())
    scratch = x.new_empty(step, depth)

    def dequantized(start: int, count: int) -> Tensor:
        blocks = slice(start // CHANNELS, (start + count) // CHANNELS)
        zeros, minimums = (None if p is None else p[blocks] for p in (zero, minimum))
        return plan(weight[blocks], scale[blocks], zeros, minimums, scratch[:count]).run()

    if step == channels:
        return F.linear(x, dequantized(0, channels), bias)
    out = x.new_empty(*x.shape[:-1], channels)
    rows, to = x.reshape(-1, depth), out.view(-1, channels)
    # a slab's product is done before the next one overwrites the scratch: one stream runs both
    for start, count in slabs(channels, step):
        part, columns = dequantized(start, count).T, slice(start, start + count)
        if bias is None:
            torch.mm(rows, part, out=to[:, columns])
        else:
            torch.addmm(bias[columns], rows, part, out=to[:, columns])
    return out


def slab(channels: int, channel_bytes: int) -> int:
    """Channels in the scratch at a time: whole blocks, and parts of about equal size."""
    parts = cdiv(channels * channel_bytes, WIDE_BYTES)
    return min(channels, cdiv(channels, parts * CHANNELS) * CHANNELS)


def slabs(channels: int, step: int) -> Iterator[tuple[int, int]]:
    """(first channel, number of channels) of each part."""
    for start in range(0, channels, step):
        yield start, min(step, channels - start)
