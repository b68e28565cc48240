"""`route` in Triton: for few rows, one kernel, which multiplies like that of `fused_linear`.

The last program of a tile of experts knows the norm's factors, and writes some of the normalized
channels. The last of these programs reads the logits of all experts, and chooses.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.route import route
from llmc.kernels.triton import choose_experts, fused_linear, norm
from llmc.kernels.triton.choose_experts import store_choices
from llmc.kernels.triton.counters import counters, is_last
from llmc.kernels.triton.define import define, same_dtype, supports_tensors
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.fused_linear import linear_tile, prefetch_tile
from llmc.kernels.triton.launch import Plan, cdiv, multiprocessors, power_of_2
from llmc.kernels.triton.linear_configs import FEW_ROWS, few_rows_config

_MAX_EXPERTS = 512  # the last program holds the logits of FEW_ROWS tokens in registers
# A program normalizes as many values at a time, and at most as many: few experts are few tiles, for
# whose programs the channels of many tokens take longer than the launch of a kernel does.
_BLOCK_VALUES = 8192
_MAX_VALUES = 16384


@triton.jit
def store_normed(
    x, square, norm_weight, normed, first, rows, x_row, eps, offset,
    K: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """CHANNELS of rms_norm(x [rows, K]) from `first` on; square [ROWS]: the sums of squares."""
    factor = (1 / tl.sqrt_rn(square / K + eps))[:, None]
    m = tl.arange(0, ROWS)[:, None]
    end = min(first + CHANNELS, K)
    for k0 in tl.range(first, end, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        known = (m < rows) & (k < end)[None, :]
        y = tl.load(x + m * x_row + k[None, :], mask=known, other=0.0).to(tl.float32) * factor
        if WEIGHTED:
            gain = tl.load(norm_weight + k, mask=k < end, other=0.0).to(tl.float32) + offset
            y *= gain[None, :]
        tl.store(
            normed + m.to(tl.int64) * K + k[None, :], y.to(normed.dtype.element_ty), mask=known
        )


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    x, weight, bias, norm_weight, residual, out, partial, squares, counter, slots, normed, share,
    expert, correction, rows, x_row, weight_row, residual_row, eps, offset, sum_eps, factor,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    WEIGHTED: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, NORMALIZED: tl.constexpr, SCORE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, SHARED: tl.constexpr,
    SHARED_GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The arguments are those of `linear_tile` for the logits [rows, N], and of `store_choices`.
    counter: one for each tile of experts and one more. normed [rows, K]: each tile writes CHANNELS
    of them. ROWS: 1, or the most that there can be."""
    tile, part, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if PDL:
        prefetch_tile(weight, weight_row, tile, part * SPLIT_K, N, K, BLOCK_N, BLOCK_K, False)
        wait_for_previous()
    is_done, square = linear_tile(
        tile, part, x, weight, bias, norm_weight, residual, out, partial, squares, counter, rows,
        x_row, weight_row, residual_row, eps, offset,
        N, K, SPLITS, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_K, NORM, WEIGHTED, BIAS, ACT, GATED,
        ADD, DOT, PRECISION, UPCAST,
    )  # fmt: skip
    if is_done:
        chooses = is_last(counter + tiles, tiles)
        # the rows of the tile beyond ROWS are zero
        squares_of_rows = tl.sum(tl.reshape(square, [BLOCK_M // ROWS, ROWS]), axis=0)
        store_normed(
            x, squares_of_rows, norm_weight, normed, tile * CHANNELS, rows, x_row, eps, offset,
            K, ROWS, CHANNELS, BLOCK, WEIGHTED,
        )  # fmt: skip
        if chooses:
            token, e = tl.arange(0, ROWS), tl.arange(0, EXPERTS_PAD)
            known = token < rows
            EXPERTS: tl.constexpr = N - SHARED if SHARED_GATED else N
            row = out + token * N
            logits = tl.load(
                row[:, None] + e[None, :], mask=known[:, None] & (e < EXPERTS)[None, :],
                other=float("-inf"), cache_modifier=".cg",
            )  # fmt: skip
            gates = row + EXPERTS if SHARED_GATED else None
            logits = tl.where(known[:, None], logits.to(tl.float32), 0.0)
            store_choices(
                logits, token, known, slots, share, expert, correction, gates, sum_eps, factor,
                EXPERTS, COUNT, COUNT_PAD, NORMALIZED, SCORE, GROUPS, KEPT_GROUPS, SHARED,
            )  # fmt: skip


def plan(
    x: Tensor, norm_weight: Tensor | None, eps: float, offset: float, router: Tensor,
    bias: Tensor | None, slot_mapping: Tensor | None, count: int, normalized: bool,
    dtype: torch.dtype, correction: Tensor | None = None, score: str = "softmax", groups: int = 1,
    kept_groups: int = 1, sum_eps: float = 0.0, factor: float = 1.0, shared: int = 0,
    gated: bool = False,
) -> Plan[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """For up to FEW_ROWS rows."""
    rows, depth = x.shape
    (linear,) = fused_linear.plan_without_gate(
        route_kernel, x, router, bias, norm_weight, eps, offset, None, None
    ).launches
    normed = x.new_empty(rows, depth)
    weight = x.new_empty(rows, count + shared, dtype=dtype)
    expert = x.new_empty(rows, count + shared, dtype=torch.int64)
    tiles = linear.grid[0]
    channels, at_once = cdiv(depth, tiles), 1 if rows == 1 else FEW_ROWS
    launch = replace(
        linear,
        args={
            **linear.args, "counter": counters(x.device, tiles + 1), "slots": slot_mapping,
            "normed": normed, "share": weight, "expert": expert, "correction": correction,
            "sum_eps": sum_eps, "factor": factor,
        },
        constants={
            **linear.constants, "ROWS": at_once, "CHANNELS": channels,
            "BLOCK": min(power_of_2(channels), _BLOCK_VALUES // at_once),
            "EXPERTS_PAD": power_of_2(router.shape[0] - shared * gated), "COUNT": count,
            "COUNT_PAD": power_of_2(count + shared), "NORMALIZED": normalized,
            "SCORE": score, "GROUPS": groups, "KEPT_GROUPS": kept_groups, "SHARED": shared,
            "SHARED_GATED": gated,
        },
    )  # fmt: skip
    return Plan(out=(normed, weight, expert), launches=(launch,))


def takes(x: Tensor, router: Tensor, eps: float, gates: int = 0) -> bool:
    """Whether one kernel computes these rows. gates: rows of the router that are no expert's."""
    rows, depth = x.shape
    if rows > FEW_ROWS or router.shape[0] - gates > _MAX_EXPERTS:
        return False
    if not fused_linear.takes(x, router, eps):
        return False
    experts, size = router.shape[0], router.element_size()
    config = few_rows_config(rows, experts, depth, size, False, multiprocessors(x.device))
    return rows * cdiv(depth, cdiv(experts, config.tiles.block_n)) <= _MAX_VALUES


def run(
    x: Tensor, norm_weight: Tensor | None, eps: float, offset: float, router: Tensor,
    bias: Tensor | None, slot_mapping: Tensor | None, count: int, normalized: bool,
    dtype: torch.dtype, correction: Tensor | None = None, score: str = "softmax", groups: int = 1,
    kept_groups: int = 1, sum_eps: float = 0.0, factor: float = 1.0, shared: int = 0,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if takes(x, router, eps, shared * gated):
        return plan(
            x, norm_weight, eps, offset, router, bias, slot_mapping, count, normalized, dtype,
            correction, score, groups, kept_groups, sum_eps, factor, shared, gated,
        ).run()  # fmt: skip
    y = norm.plan(x, norm_weight, eps, offset).run()
    logits = fused_linear.run(y.to(router.dtype), router, bias, None, None, 0.0, None, None)
    chosen = choose_experts.plan(
        logits, slot_mapping, count, normalized, dtype, correction, score, groups, kept_groups,
        sum_eps, factor, shared, gated,
    )  # fmt: skip
    return (y, *chosen.run())


def _supports(
    *, x: Tensor, norm_weight: Tensor | None, router: Tensor, bias: Tensor | None,
    slot_mapping: Tensor | None, count: int, correction: Tensor | None, groups: int,
    shared: int, gated: bool, **others: object,
) -> bool:  # fmt: skip
    chosen = choose_experts.supports_choice(
        router.shape[0] - shared * gated, count + shared, groups, slot_mapping, correction
    )
    fits = norm.supports(x=x, weight=norm_weight) and supports_tensors(router, bias)
    return fits and chosen and same_dtype(router, bias)


define(route, run=run, supports=_supports)
