"""`choose_experts` and `sum_experts` in Triton: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.choose_experts import choose_experts, sum_experts
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.configs import POINTWISE_BLOCK, row_warps
from llmc.kernels.triton.define import define, on_device, supports_tensors
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2

_MAX_COUNT = 32  # the kernel's loop over them is unrolled


@triton.jit
def store_choices(
    x, token, known, slots, weight, expert,
    EXPERTS: tl.constexpr, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Choose for each known token [ROWS] by its logits x [ROWS, EXPERTS_PAD], float32, which are
    -inf beyond EXPERTS; those of other tokens are any numbers. Of equal logits the first is
    chosen."""
    minus_inf = float("-inf")
    e = tl.arange(0, x.shape[1])[None, :]
    c = tl.arange(0, COUNT_PAD)[None, :]
    highest = tl.max(x, axis=1)[:, None]
    # a NaN among the logits makes every weight NaN, so that it is noticed
    total = tl.sum(tl.exp(x - highest), axis=1)[:, None]
    left = tl.broadcast_to(e < EXPERTS, x.shape)
    best = tl.full([x.shape[0], COUNT_PAD], minus_inf, tl.float32)
    chosen = tl.zeros([x.shape[0], COUNT_PAD], tl.int32)
    for i in tl.static_range(COUNT):
        top = tl.max(tl.where(left, x, minus_inf), axis=1)[:, None]
        index = tl.min(tl.where(left & (x == top), e, EXPERTS), axis=1)[:, None]
        best = tl.where(c == i, top, best)
        chosen = tl.where(c == i, index, chosen)
        left = left & (e != index)
    share = tl.exp(best - highest)
    if NORMALIZED:
        total = tl.sum(share, axis=1)[:, None] + total * 0
    if slots is not None:
        is_padding = tl.load(slots + token, mask=known, other=-1) < 0
        chosen = tl.where(is_padding[:, None], EXPERTS, chosen)
    at = token[:, None] * COUNT + c
    stored = known[:, None] & (c < COUNT)
    tl.store(weight + at, (share / total).to(weight.dtype.element_ty), mask=stored)
    tl.store(expert + at, chosen.to(tl.int64), mask=stored)


@triton.jit
def choose_experts_kernel(
    logits, slots, weight, expert, logits_row,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr,
    NORMALIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    if PDL:
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    e = tl.arange(0, EXPERTS_PAD)[None, :]
    at = logits + token[:, None] * logits_row + e
    x = tl.load(at, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    store_choices(
        x, token, token >= 0, slots, weight, expert, EXPERTS, COUNT, COUNT_PAD, NORMALIZED
    )


@triton.jit
def store_weighted_sums(
    rows, weight, residual, out, tokens, token, i, rows_row, residual_row,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """The sums of `sum_experts` for each token [TOKENS] below `tokens` and channel i [BLOCK] below
    WIDTH, added in order of the choices. CACHE: cache modifier with which rows are read."""
    token = token.to(tl.int64)[:, None]
    known = token < tokens
    stored = known & (i < WIDTH)[None, :]
    total = tl.zeros([token.shape[0], i.shape[0]], tl.float32)
    if residual is not None:
        own = tl.load(residual + token * residual_row + i[None, :], mask=stored, other=0.0)
        total += own.to(tl.float32)
    for c in tl.static_range(COUNT):
        choice = token * COUNT + c
        row = tl.load(
            rows + choice * rows_row + i[None, :], mask=stored, other=0.0, cache_modifier=CACHE
        )
        total += row.to(tl.float32) * tl.load(weight + choice, mask=known, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + i[None, :], total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def sum_experts_kernel(
    rows, weight, residual, out, rows_row, residual_row,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token and block of channels."""
    if PDL:
        wait_for_previous()
    token = tl.program_id(0) + tl.arange(0, 1)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    store_weighted_sums(
        rows, weight, residual, out, tl.num_programs(0), token, i, rows_row, residual_row,
        COUNT, WIDTH, "",
    )  # fmt: skip


def plan(
    logits: Tensor, slot_mapping: Tensor | None, count: int, normalized: bool, dtype: torch.dtype
) -> Plan[tuple[Tensor, Tensor]]:
    tokens, experts = logits.shape
    weight = logits.new_empty(tokens, count, dtype=dtype)
    expert = logits.new_empty(tokens, count, dtype=torch.int64)
    pdl = dependent_launch.applies_to(logits.device)
    launch = Launch(
        kernel=choose_experts_kernel,
        grid=(tokens,),
        args={
            "logits": logits, "slots": slot_mapping, "weight": weight, "expert": expert,
            "logits_row": logits.stride(0),
        },
        constants={
            "EXPERTS": experts, "EXPERTS_PAD": power_of_2(experts), "COUNT": count,
            "COUNT_PAD": power_of_2(count), "NORMALIZED": normalized, "PDL": pdl,
        },
        num_warps=row_warps(power_of_2(experts)),
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=(weight, expert), launches=(launch,))


def plan_sum(
    rows: Tensor, weight: Tensor, dtype: torch.dtype, residual: Tensor | None = None
) -> Plan[Tensor]:
    tokens, count = weight.shape
    width = rows.shape[1]
    out = rows.new_empty(tokens, width, dtype=dtype)
    block = min(POINTWISE_BLOCK, power_of_2(width))
    pdl = dependent_launch.applies_to(rows.device)
    launch = Launch(
        kernel=sum_experts_kernel,
        grid=(tokens, cdiv(width, block)),
        args={
            "rows": rows, "weight": weight.contiguous(), "residual": residual, "out": out,
            "rows_row": rows.stride(0),
            "residual_row": 0 if residual is None else residual.stride(0),
        },
        constants={"COUNT": count, "WIDTH": width, "BLOCK": block, "PDL": pdl},
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def supports(*, logits: Tensor, slot_mapping: Tensor | None, count: int, **others: object) -> bool:
    slots = slot_mapping is None or (on_device(slot_mapping) and slot_mapping.is_contiguous())
    return supports_tensors(logits) and slots and count <= _MAX_COUNT


def supports_sum(weight: Tensor, *others: Tensor | None) -> bool:
    """Whether the sum with this weight of rows, and of a residual, in `others` is supported."""
    return supports_tensors(weight, *others) and int(weight.shape[1]) <= _MAX_COUNT


def _supports_sum(
    *, rows: Tensor, weight: Tensor, residual: Tensor | None, **others: object
) -> bool:
    return supports_sum(weight, rows, residual)


define(choose_experts, plan=plan, supports=supports)
define(sum_experts, plan=plan_sum, supports=_supports_sum)
