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
from llmc.kernels.triton.state import sigmoid, softplus

_MAX_COUNT = 32  # the kernel's loop over them is unrolled


@triton.jit
def is_in_kept_group(ranked, GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr):
    """Of ranked [ROWS, E], which are in the KEPT_GROUPS groups with the highest sums of two."""
    minus_inf = float("-inf")
    ROWS: tl.constexpr = ranked.shape[0]
    SIZE: tl.constexpr = ranked.shape[1] // GROUPS
    grouped = tl.reshape(ranked, [ROWS, GROUPS, SIZE])
    member = tl.arange(0, SIZE)[None, None, :]
    first = tl.max(grouped, axis=2)
    at = tl.min(tl.where(grouped == first[:, :, None], member, SIZE), axis=2)
    both = first + tl.max(tl.where(member == at[:, :, None], minus_inf, grouped), axis=2)
    group = tl.arange(0, GROUPS)[None, :]
    left = tl.broadcast_to(group >= 0, both.shape)
    for _ in tl.static_range(KEPT_GROUPS):
        top = tl.max(tl.where(left, both, minus_inf), axis=1)[:, None]
        index = tl.min(tl.where(left & (both == top), group, GROUPS), axis=1)[:, None]
        left = left & (group != index)
    is_kept = tl.broadcast_to((left == 0)[:, :, None], [ROWS, GROUPS, SIZE])
    return tl.reshape(is_kept, ranked.shape)


@triton.jit
def score_of(x, highest, SCORE: tl.constexpr):
    """The score of logits; that of a softmax is yet to be divided by its sum."""
    if SCORE == "sigmoid":
        return sigmoid(x)
    elif SCORE == "sqrt_softplus":
        return tl.sqrt_rn(softplus(x))
    else:
        return tl.exp(x - highest)


@triton.jit
def store_choices(
    x, token, known, slots, weight, expert, correction, gates, sum_eps, factor,
    EXPERTS: tl.constexpr, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, NORMALIZED: tl.constexpr,
    SCORE: tl.constexpr, GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Choose for each known token [ROWS] by its logits x [ROWS, EXPERTS_PAD], float32, which are
    -inf beyond EXPERTS; those of other tokens are any numbers. Of equal values the first is
    chosen. If there are GROUPS, they and EXPERTS are powers of two. SHARED experts come last.
    gates [ROWS]: None, or pointers to the first of their gates."""
    minus_inf = float("-inf")
    e = tl.arange(0, x.shape[1])[None, :]
    c = tl.arange(0, COUNT_PAD)[None, :]
    highest = tl.max(x, axis=1)[:, None]
    # a NaN among the logits makes every weight NaN, so that it is noticed
    score = score_of(x, highest, SCORE)
    total = tl.sum(tl.where(e < EXPERTS, score, 0.0), axis=1)[:, None]
    if SCORE != "softmax":
        total = 1 + 0 * total
    BY_SCORE: tl.constexpr = correction is not None or KEPT_GROUPS < GROUPS
    ranked = score / total if BY_SCORE else x  # logits have the order of their scores
    if correction is not None:
        ranked += tl.load(correction + e, mask=e < EXPERTS, other=0.0).to(tl.float32)
    left = tl.broadcast_to(e < EXPERTS, x.shape)
    if KEPT_GROUPS < GROUPS:
        left = left & is_in_kept_group(ranked, GROUPS, KEPT_GROUPS)
    best = tl.full([x.shape[0], COUNT_PAD], 0.0, tl.float32)
    chosen = tl.zeros([x.shape[0], COUNT_PAD], tl.int32)
    for i in tl.static_range(COUNT):
        top = tl.max(tl.where(left, ranked, minus_inf), axis=1)[:, None]
        index = tl.min(tl.where(left & (ranked == top), e, EXPERTS), axis=1)[:, None]
        if BY_SCORE:
            top = tl.sum(tl.where(e == index, score, 0.0), axis=1)[:, None]
        else:
            top = score_of(top, highest, SCORE)
        best = tl.where(c == i, top, best)
        chosen = tl.where(c == i, index, chosen)
        left = left & (e != index)
    if NORMALIZED:
        total = tl.sum(best, axis=1)[:, None] + total * 0 + sum_eps * total
    share = best / total * factor
    if SHARED > 0:
        own = tl.full(share.shape, 1.0, tl.float32)
        if gates is not None:
            is_gate = known[:, None] & (c >= COUNT) & (c < COUNT + SHARED)
            gate = tl.load(
                gates[:, None] + (c - COUNT), mask=is_gate, other=0.0, cache_modifier=".cg"
            )
            own = sigmoid(gate.to(tl.float32))
        share = tl.where(c < COUNT, share, own)
        chosen = tl.where(c < COUNT, chosen, EXPERTS + c - COUNT)
    if slots is not None:
        is_padding = tl.load(slots + token, mask=known, other=-1) < 0
        chosen = tl.where(is_padding[:, None], EXPERTS + SHARED, chosen)
    at = token[:, None] * (COUNT + SHARED) + c
    stored = known[:, None] & (c < COUNT + SHARED)
    tl.store(weight + at, share.to(weight.dtype.element_ty), mask=stored)
    tl.store(expert + at, chosen.to(tl.int64), mask=stored)


@triton.jit
def choose_experts_kernel(
    logits, slots, weight, expert, correction, logits_row, sum_eps, factor,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr,
    NORMALIZED: tl.constexpr, SCORE: tl.constexpr, GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    if PDL:
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    e = tl.arange(0, EXPERTS_PAD)[None, :]
    row = logits + token * logits_row
    x = tl.load(row[:, None] + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    gates = row + EXPERTS if GATED else None
    store_choices(
        x, token, token >= 0, slots, weight, expert, correction, gates, sum_eps, factor,
        EXPERTS, COUNT, COUNT_PAD, NORMALIZED, SCORE, GROUPS, KEPT_GROUPS, SHARED,
    )  # fmt: skip


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
    logits: Tensor, slot_mapping: Tensor | None, count: int, normalized: bool, dtype: torch.dtype,
    correction: Tensor | None = None, score: str = "softmax", groups: int = 1,
    kept_groups: int = 1, sum_eps: float = 0.0, factor: float = 1.0, shared: int = 0,
    gated: bool = False,
) -> Plan[tuple[Tensor, Tensor]]:  # fmt: skip
    tokens, columns = logits.shape
    experts = columns - shared if gated else columns
    weight = logits.new_empty(tokens, count + shared, dtype=dtype)
    expert = logits.new_empty(tokens, count + shared, dtype=torch.int64)
    pdl = dependent_launch.applies_to(logits.device)
    launch = Launch(
        kernel=choose_experts_kernel,
        grid=(tokens,),
        args={
            "logits": logits, "slots": slot_mapping, "weight": weight, "expert": expert,
            "correction": correction, "logits_row": logits.stride(0), "sum_eps": sum_eps,
            "factor": factor,
        },
        constants={
            "EXPERTS": experts, "EXPERTS_PAD": power_of_2(experts), "COUNT": count,
            "COUNT_PAD": power_of_2(count + shared), "NORMALIZED": normalized,
            "SCORE": score, "GROUPS": groups, "KEPT_GROUPS": kept_groups, "SHARED": shared,
            "GATED": gated, "PDL": pdl,
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


def supports_choice(
    experts: int, count: int, groups: int, slot_mapping: Tensor | None, correction: Tensor | None
) -> bool:
    """Whether `store_choices` chooses `count` of so many experts."""
    slots = slot_mapping is None or (on_device(slot_mapping) and slot_mapping.is_contiguous())
    whole = groups == 1 or all(n == power_of_2(n) for n in (experts, groups))
    return supports_tensors(correction) and slots and count <= _MAX_COUNT and whole


def _supports(
    *, logits: Tensor, slot_mapping: Tensor | None, count: int, correction: Tensor | None,
    groups: int, shared: int, gated: bool, **others: object,
) -> bool:  # fmt: skip
    experts = logits.shape[1] - shared * gated
    choice = supports_choice(experts, count + shared, groups, slot_mapping, correction)
    return supports_tensors(logits) and choice


def supports_sum(weight: Tensor, *others: Tensor | None) -> bool:
    """Whether the sum with this weight of rows, and of a residual, in `others` is supported."""
    return supports_tensors(weight, *others) and int(weight.shape[1]) <= _MAX_COUNT


def _supports_sum(
    *, rows: Tensor, weight: Tensor, residual: Tensor | None, **others: object
) -> bool:
    return supports_sum(weight, rows, residual)


define(choose_experts, plan=plan, supports=_supports)
define(sum_experts, plan=plan_sum, supports=_supports_sum)
