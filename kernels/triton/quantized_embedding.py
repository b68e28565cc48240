"""`quantized_embedding` in Triton: a program dequantizes a segment of one row.

A row is a channel: one four-byte word in each line of its block. A line holds words of 16 rows, so
programs that read other rows of the block find it in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.quantized_embedding import quantized_embedding
from llmc.kernels.quantized_linear import CHANNELS, inputs_of
from llmc.kernels.triton.define import DTYPES, define, on_device
from llmc.kernels.triton.launch import Launch, Plan, cdiv
from llmc.kernels.triton.quantized_linear import (
    format_of,
    load_minimum,
    load_scale,
    load_word,
    weight_constants,
    widen,
)

_BLOCK = 1024


@triton.jit
def embedding_kernel(
    ids, words, scale, zero, minimum, out,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr, PARTS: tl.constexpr,
    WORDS: tl.constexpr, MIDDLE: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """words [N / 16, WORDS] int32; scale, zero, minimum [N / 16, K / GROUP, 16]. PARTS: as in
    `load_scale`."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.load(ids + row).to(tl.int64)
    known = (k < K) & (channel >= 0) & (channel < N)
    block, lane = channel // 16, channel % 16
    q = load_word(words + block * WORDS + lane, k // PER, known, FORMAT)
    shift = k % PER * (32 // PER)
    values = widen(q, shift, FORMAT)
    if FORMAT == "fp8":
        values = tl.where((q >> shift & 0x7F) == 0x7F, float("nan"), values)
    group = k // GROUP
    if ZERO:
        at = zero + block * (K // GROUP * 16) + group * 16 + lane
        values -= tl.load(at, mask=known, other=0).to(tl.float32)
    else:
        values -= MIDDLE
    values *= load_scale(scale, block, group, lane, known, K, GROUP, FORMAT, PARTS)
    if MINIMUM:
        values += load_minimum(scale, minimum, block, group, lane, known, K, GROUP, PARTS)
    tl.store(out + row * K + k, values.to(out.dtype.element_ty), mask=k < K)


def plan(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    minimum: Tensor | None,
    dtype: torch.dtype,
) -> Plan[Tensor]:
    depth = inputs_of(weight)
    out = scale.new_empty(*ids.shape, depth, dtype=dtype)
    launch = Launch(
        kernel=embedding_kernel,
        grid=(ids.numel(), cdiv(depth, _BLOCK)),
        args={
            "ids": ids.contiguous(), "words": weight.view(torch.int32), "scale": scale,
            "zero": zero, "minimum": minimum, "out": out,
        },
        constants={
            "N": weight.shape[0] * CHANNELS, "K": depth, "BLOCK": _BLOCK,
            **weight_constants(weight, scale, minimum, depth), "ZERO": zero is not None,
        },
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def _supports(
    *, ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, **others: object
) -> bool:
    return (
        dtype in DTYPES
        and on_device(ids, weight)
        and format_of(weight, scale) is not None
        and weight.is_contiguous()
    )


define(quantized_embedding, plan=plan, supports=_supports)
