"""`expert_linear` in Triton: one grouped matrix product, with each expert's rows tiled separately.

The grid depends only on shapes, so the host never reads which experts were chosen. Of few rows, as
in decode steps, each program itself finds its (expert, tile): that is a few hundred integers,
cheaper than the launches of a sort. Many rows are first sorted by expert, once for all linears of
a layer if `sort_experts` is called.

`sum_expert_linear` of up to FEW_ROWS tokens is the same launch: the last program of a tile of
channels adds the experts' results as `sum_experts` does. More tokens take that kernel, in which
more programs share the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.expert_linear import expert_linear, sort_experts
from llmc.kernels.sum_expert_linear import sum_expert_linear
from llmc.kernels.triton import choose_experts, dependent_launch
from llmc.kernels.triton.act_mul import gated
from llmc.kernels.triton.attention_plan import at, locate
from llmc.kernels.triton.choose_experts import store_weighted_sums
from llmc.kernels.triton.configs import GemmConfig, expert_config
from llmc.kernels.triton.counters import counters, is_last
from llmc.kernels.triton.define import (
    define,
    dot_precision,
    needs_upcast,
    on_device,
    same_dtype,
    supports_tensors,
)
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.linear_configs import FEW_ROWS

Gate = tuple[str | None, float | None, float, bool]  # act, limit, shift and interleaved
UNGATED: Gate = (None, None, 0.0, False)
_ROWS = (16, 64, 256, 1024)  # classes of numbers of rows that are not sorted


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """What `sum_experts` does with the results: the arguments besides them."""

    share: Tensor
    dtype: torch.dtype
    residual: Tensor | None


@triton.jit
def expert_of(chosen, row, rows, EXPERTS: tl.constexpr):
    """The expert of each row; EXPERTS for a number outside [0, EXPERTS)."""
    expert = tl.load(chosen + row, mask=row < rows, other=0)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS).to(tl.int32)


@triton.jit
def rows_of_tile(
    chosen, offsets, rows, ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(expert, its rows of x in this program's tile, mask of valid rows, number of tiles).

    chosen [rows]: the expert of each row, with ROWS >= rows. Expert EXPERTS stands for all numbers
    outside [0, EXPERTS), so that every row is in a tile. ROWS = 0: `chosen` are the rows sorted by
    expert, and offsets [EXPERTS + 1] the first index of each expert. A program with a higher expert
    has nothing to do: it is beyond the number of tiles.
    """
    e = tl.arange(0, EXPERTS_PAD)
    if ROWS == 0:
        first = tl.load(offsets)
        known = tl.load(offsets + EXPERTS) - first  # rows of all experts
        begin = tl.load(offsets + e, mask=e < EXPERTS, other=0)
        count = tl.load(offsets + e + 1, mask=e < EXPERTS, other=0) - begin
        count = tl.where(e == EXPERTS, rows - known, count)
        tiles = (count + BLOCK_M - 1) // BLOCK_M
        expert, tile = locate(tl.program_id(0), tiles, EXPERTS_PAD)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mine = m < at(count, expert, EXPERTS_PAD)
        # rows without an expert are before those of the first one and after those of the last
        place = tl.where((expert == EXPERTS) & (m >= first), m + known, m)
        row = tl.load(chosen + at(begin, expert, EXPERTS_PAD) + place, mask=mine, other=0)
    else:
        every = tl.arange(0, ROWS)
        of_row = expert_of(chosen, every, rows, EXPERTS)
        count = tl.histogram(of_row, EXPERTS_PAD, mask=every < rows)
        tiles = (count + BLOCK_M - 1) // BLOCK_M
        expert, tile = locate(tl.program_id(0), tiles, EXPERTS_PAD)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mine = m < at(count, expert, EXPERTS_PAD)
        row = tl.zeros([BLOCK_M], tl.int32)
        # few at a time, or comparing every row with every place would take too many registers
        PART: tl.constexpr = min(ROWS, 2048 // BLOCK_M)
        before = 0
        for first in tl.range(0, ROWS, PART):
            r = first + tl.arange(0, PART)
            same = (r < rows) & (expert_of(chosen, r, rows, EXPERTS) == expert)
            place = before + tl.cumsum(same.to(tl.int32), axis=0) - 1
            found = same[None, :] & (place[None, :] == m[:, None])
            row += tl.sum(tl.where(found, r[None, :], 0), axis=1)
            before += tl.sum(same.to(tl.int32), axis=0)
    return expert, row.to(tl.int64), mine, tl.sum(tiles, axis=0)


@triton.jit
def channels_of_tile(
    tile, N: tl.constexpr, BLOCK_N: tl.constexpr, ACT: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The channels [BLOCK_N] of N that a tile sums. With an ACT, half of them are gates, and half
    what these multiply. Unless they are INTERLEAVED, the second half is N / 2 channels further on,
    and the last tile may sum more, which is not stored."""
    j = tl.arange(0, BLOCK_N)
    if ACT is None or INTERLEAVED:
        n = tile * BLOCK_N + j
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        n = tile * HALF + j % HALF + j // HALF * (N // 2)
    return n


@triton.jit
def store_tile(y, out, row, mine, WIDTH: tl.constexpr):
    """A tile [BLOCK_M, BLOCK] of out [rows, WIDTH], rounded to its dtype."""
    BLOCK: tl.constexpr = y.shape[1]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        out + row[:, None] * WIDTH + n[None, :],
        y.to(out.dtype.element_ty),
        mask=mine[:, None] & (n < WIDTH)[None, :],
    )


@triton.jit
def store_zeros(
    out, row, mine, N: tl.constexpr, BLOCK_N: tl.constexpr, ACT: tl.constexpr
):  # fmt: skip
    """Zeros for a tile of rows without an expert."""
    PER: tl.constexpr = 1 if ACT is None else 2  # sums for each result
    zeros = tl.zeros([row.shape[0], BLOCK_N // PER], tl.float32)
    store_tile(zeros, out, row, mine, N // PER)


@triton.jit
def store_sums(
    acc, bias, expert, bias_expert, out, row, n, mine,
    N: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A tile's sums over the channels n with its expert's bias, and activated with an ACT."""
    if BIAS:
        own = tl.load(bias + expert.to(tl.int64) * bias_expert + n, mask=n < N, other=0.0)
        acc += own.to(tl.float32)[None, :]
    if ACT is None:
        store_tile(acc, out, row, mine, N)
    else:
        if INTERLEAVED:
            pairs = tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2])
        else:
            pairs = tl.permute(tl.reshape(acc, [acc.shape[0], 2, acc.shape[1] // 2]), (0, 2, 1))
        gate, up = tl.split(pairs)
        store_tile(gated(gate, up, ACT, LIMIT, SHIFT), out, row, mine, N // 2)


@triton.jit
def sum_if_last(
    parts, share, residual, total, counter, tiles, rows, residual_row,
    N: tl.constexpr, BLOCK_N: tl.constexpr, COUNT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Call after storing a tile of parts [rows, N]: the last of the `tiles` programs of these
    channels stores their sums over each token's COUNT choices in total [rows / COUNT, N]. TOKENS:
    at least as many as there are. COUNT = 0: nothing is summed."""
    if COUNT > 0 and is_last(counter + tl.program_id(1), tiles):
        token = tl.arange(0, TOKENS)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        store_weighted_sums(
            parts, share, residual, total, rows // COUNT, token, n, N, residual_row,
            COUNT, N, ".cg",
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def expert_kernel(
    x, weight, bias, chosen, offsets, out, share, residual, total, counter, rows, x_row,
    weight_expert, weight_n, weight_k, bias_expert, residual_row, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    INTERLEAVED: tl.constexpr, COUNT: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """chosen, offsets: as in `rows_of_tile`. x has a row for CHOICES consecutive results. share,
    residual, total, counter, COUNT and TOKENS: as in `sum_if_last`."""
    if PDL:
        wait_for_previous()
    expert, row, mine, tiles = rows_of_tile(
        chosen, offsets, rows, ROWS, EXPERTS, EXPERTS_PAD, BLOCK_M
    )
    if expert > EXPERTS:
        return
    n = channels_of_tile(tl.program_id(1), N, BLOCK_N, ACT, INTERLEAVED)
    if expert == EXPERTS:
        store_zeros(out, row, mine, N, BLOCK_N, ACT)
        sum_if_last(
            out, share, residual, total, counter, tiles, rows, residual_row, N, BLOCK_N,
            COUNT, TOKENS,
        )  # fmt: skip
        return
    w = weight + expert.to(tl.int64) * weight_expert + n[None, :] * weight_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + (row // CHOICES)[:, None] * x_row + k[None, :],
            mask=mine[:, None] & (k < K)[None, :],
            other=0.0,
        )
        b = tl.load(w + k[:, None] * weight_k, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
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


def are_sorted(rows: int, experts: int) -> bool:
    """Whether so many rows are sorted by expert: those with tiles of more than 64 rows are too."""
    return rows > _ROWS[-1] or rows > 64 * experts


def _sort(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    if are_sorted(expert.shape[0], experts):
        made: tuple[Tensor, Tensor] = sort_experts.reference(expert, experts)
        return made
    return torch.empty_like(expert), expert.new_empty(experts + 1, dtype=torch.int32)


def _chosen_rows(
    x: Tensor, expert: Tensor, experts: int, order: Tensor | None, offsets: Tensor | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and constants of `rows_of_tile`."""
    rows = expert.shape[0]
    constants = {
        "EXPERTS": experts, "EXPERTS_PAD": power_of_2(experts + 1),
        "CHOICES": max(1, rows // max(1, x.shape[0])),
    }  # fmt: skip
    if not are_sorted(rows, experts):
        size = next(size for size in _ROWS if rows <= size)
        given = {"chosen": expert.contiguous(), "offsets": None, "rows": rows}
        return given, {"ROWS": size, **constants}
    if order is None or offsets is None:
        order, offsets = sort_experts.reference(expert, experts)
    return {"chosen": order, "offsets": offsets, "rows": rows}, {"ROWS": 0, **constants}


def _tiles_of(rows: int, experts: int, block_m: int) -> int:
    """A bound on the number of tiles: an expert without rows has none, and rounding up adds less
    than one tile per expert, of which one more stands for numbers that are no expert's."""
    return min(rows, rows // block_m + experts + 1)


def plan_tiles(
    kernel: Any,
    config: GemmConfig,
    x: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    order: Tensor | None,
    offsets: Tensor | None,
    gate: Gate,
    sums: Sum | None,
    *,
    experts: int,
    channels: int,
    args: dict[str, Any],
    constants: dict[str, Any],
) -> Plan[Tensor]:
    """A grouped product of x [T, K] by `kernel`, which takes `args` and `constants` besides what
    `rows_of_tile`, `store_sums` and `sum_if_last` need. Returns [rows, channels] in x's dtype, or
    half as many columns with an act, or what `sums` makes of them."""
    rows, depth = expert.shape[0], x.shape[1]
    given, shared = _chosen_rows(x, expert, experts, order, offsets)
    act, limit, shift, interleaved = gate
    out = x.new_empty(rows, channels // (1 if act is None else 2))
    blocks = cdiv(channels, config.block_n)
    here = None  # what this launch itself sums
    if sums is not None and sums.share.shape[0] <= FEW_ROWS and not are_sorted(rows, experts):
        here = sums
    pdl = dependent_launch.applies_to(x.device)
    launch = Launch(
        kernel=kernel,
        grid=(_tiles_of(rows, experts, config.block_m), blocks),
        args={
            **args, "bias": bias, **given, "out": out,
            "bias_expert": 0 if bias is None else bias.stride(0),
            **_sum_args(here, x, channels, blocks),
        },
        constants={
            "N": channels, "K": depth, **shared,
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
            "BIAS": bias is not None, "ACT": act, "LIMIT": limit, "SHIFT": shift,
            "INTERLEAVED": interleaved, **_sum_constants(here, shared["ROWS"]), "PDL": pdl,
            **constants,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )  # fmt: skip
    if here is not None:
        return Plan(out=launch.args["total"], launches=(launch,))
    if sums is not None:
        then = choose_experts.plan_sum(out, sums.share, sums.dtype, sums.residual)
        return Plan(out=then.out, launches=(launch, *then.launches))
    return Plan(out=out, launches=(launch,))


def _sum_args(sums: Sum | None, x: Tensor, channels: int, blocks: int) -> dict[str, Any]:
    """Arguments of `sum_if_last`; without `sums` it does nothing."""
    if sums is None:
        return {
            "share": None, "residual": None, "total": None, "counter": None, "residual_row": 0
        }  # fmt: skip
    share, residual = sums.share, sums.residual
    return {
        "share": share.contiguous(), "residual": residual,
        "total": x.new_empty(share.shape[0], channels, dtype=sums.dtype),
        "counter": counters(x.device, blocks),
        "residual_row": 0 if residual is None else residual.stride(0),
    }  # fmt: skip


def _sum_constants(sums: Sum | None, rows: int) -> dict[str, int]:
    """`rows`: of the class of numbers, so that the tokens do not make more classes."""
    count = 0 if sums is None else sums.share.shape[1]
    return {"COUNT": count, "TOKENS": min(FEW_ROWS, power_of_2(cdiv(rows, max(1, count))))}


def plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    transposed: bool,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
    act: str | None = None,
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
    sums: Sum | None = None,
) -> Plan[Tensor]:
    experts = weight.shape[0]
    n_axis, k_axis = (2, 1) if transposed else (1, 2)
    return plan_tiles(
        expert_kernel,
        expert_config(expert.shape[0], experts, x.element_size()),
        x, bias, expert, order, offsets, (act, limit, shift, interleaved), sums,
        experts=experts, channels=weight.shape[n_axis],
        args={
            "x": x, "weight": weight, "x_row": x.stride(0), "weight_expert": weight.stride(0),
            "weight_n": weight.stride(n_axis), "weight_k": weight.stride(k_axis),
        },
        constants={
            "PRECISION": dot_precision(x.dtype),
            "UPCAST": needs_upcast(x.dtype),
        },
    )  # fmt: skip


def plan_sum(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    transposed: bool,
    share: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Plan[Tensor]:
    sums = Sum(share=share, dtype=dtype, residual=residual)
    return plan(x, weight, bias, expert, transposed, order, offsets, sums=sums)


def _supports(*, x: Tensor, weight: Tensor, bias: Tensor | None, **others: object) -> bool:
    return supports_tensors(x, weight, bias) and same_dtype(x, weight, bias)


def _supports_sum(*, share: Tensor, residual: Tensor | None, **product: Any) -> bool:
    return _supports(**product) and choose_experts.supports_sum(share, residual)


def _supports_sort(*, expert: Tensor, experts: int) -> bool:
    return on_device(expert)


define(expert_linear, plan=plan, supports=_supports)
define(sum_expert_linear, plan=plan_sum, supports=_supports_sum)
define(sort_experts, run=_sort, supports=_supports_sort)
