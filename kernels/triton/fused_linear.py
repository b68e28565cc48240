"""`fused_linear`, `add_linear`, `norm_add_linear` and `linear` in Triton: for few rows, one kernel,
which streams the weight once.

One row is multiplied lane by lane, up to FUSED_ROWS rows by tensor cores. The norm's factor is the
same for a whole row, so it is applied to the sums, and the squares are accumulated along the way.
A gated norm can have smaller groups: its factor is applied to a tile that holds whole groups, or to
the sums of a part of the depth that is one group. A centered norm would cancel in the sums: each
program first reads the whole rows for their means and variances, and multiplies normalized inputs.
So it does for a norm before a residual sum before the norm; the programs of the first tile store
the sum. From a few rows on, a kernel of its own takes less time.
Deep, narrow weights are split along their depth; the last program of a tile adds the parts in a
fixed order, so results are the same in every run, unlike with atomic additions.
More rows are compute-bound: torch's own linear multiplies them, between other ops of this package.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.fused_linear import add_linear, fused_linear, norm_add_linear
from llmc.kernels.linear import linear
from llmc.kernels.triton import act_mul, dependent_launch, gated_rms_norm, norm
from llmc.kernels.triton.act_mul import activated
from llmc.kernels.triton.counters import counters, is_last, sum_of_parts
from llmc.kernels.triton.define import (
    define,
    dot_precision,
    needs_upcast,
    same_dtype,
    supports_tensors,
)
from llmc.kernels.triton.dependent_launch import prefetch, wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, multiprocessors
from llmc.kernels.triton.linear_configs import (
    CENTERED_ROWS,
    FUSED_ROWS,
    LinearConfig,
    few_rows_config,
    gated_rows_config,
    prefers_library,
)
from llmc.kernels.triton.norm import (
    centered_inputs,
    factor_of_rows,
    mean_and_factor,
    sum_with_norm,
)
from llmc.kernels.triton.state import sigmoid


@triton.jit
def prefetch_tile(
    weight, weight_row, tile, first,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Prefetch into L2 the first BLOCK_K inputs of a tile of channels, from input `first` on."""
    # one prefetch per 32 bytes of each channel
    STEP: tl.constexpr = 256 // weight.dtype.element_ty.primitive_bitwidth
    early = first + tl.arange(0, (BLOCK_K + STEP - 1) // STEP) * STEP
    early = tl.minimum(early, K - 1)[None, :]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.minimum(n, N - 1).to(tl.int64)[:, None] * weight_row
    prefetch(weight + channel + early)
    if GATED:
        prefetch(weight + channel + N * weight_row.to(tl.int64) + early)


@triton.jit
def linear_tile(
    tile, part, x, weight, bias, norm_weight, residual, out, partial, squares, counter, rows,
    x_row, weight_row, residual_row, eps, offset,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    WEIGHTED: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    gate=None, gate_row=0, SILU: tl.constexpr = False, GATE_FIRST: tl.constexpr = False,
    GROUP: tl.constexpr = 0, AHEAD: tl.constexpr = None, CENTERED: tl.constexpr = False,
    norm_bias=None, before=None, x_weight=None, total_out=None, before_row=0, x_eps=0.0,
    x_offset=0.0,
):  # fmt: skip
    """Compute the BLOCK_N channels of one tile over part `part` of the depth; the last of SPLITS
    parts stores their results. Returns whether this one was that, and then the sums of squares of
    the rows [BLOCK_M], if there is a NORM.

    weight [N, K], or [2 N, K] with the gates first if an ACT is GATED.
    partial [SPLITS, rows, N or 2 N], squares [SPLITS, tiles, rows]: sums over each part of K.
    GROUP: inputs that are normalized together; 0: all. A tile holds whole groups, or SPLIT_K is
    one. The gate multiplies before the norm if GATE_FIRST, otherwise after it.
    AHEAD: stages of the loop's pipeline, for loops without a product of tensor cores, which Triton
    pipelines only if told to.
    CENTERED: with a layer_norm, which is not a NORM, WEIGHTED or not.
    before [rows, K]: the inputs are the sum of these and of rms_norm(x), which tile 0 stores in
    total_out [rows, K].
    """
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    WHOLE: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0  # so no weight needs a mask
    inside = tl.full([BLOCK_N], True, tl.int1) if WHOLE else n < N
    first = part * SPLIT_K
    w_at = weight + n.to(tl.int64)[:, None] * weight_row
    up_at = w_at + N * weight_row.to(tl.int64)
    if DOT:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if CENTERED:
        mean, factor = mean_and_factor(x, x_row, rows, eps, K, BLOCK_M, BLOCK_K)
    if before is not None:
        x_factor = factor_of_rows(x, x_row, rows, x_eps, K, BLOCK_M, BLOCK_K)
    for k0 in tl.range(first, min(first + SPLIT_K, K), BLOCK_K, num_stages=AHEAD):
        k = k0 + tl.arange(0, BLOCK_K)
        reached = tl.full([BLOCK_K], True, tl.int1) if WHOLE else k < K
        known = inside[:, None] & reached[None, :]
        a = tl.load(
            x + m[:, None] * x_row + k[None, :], mask=(m < rows)[:, None] & reached[None, :],
            other=0.0,
        )  # fmt: skip
        if before is not None:
            known_inputs = (m < rows)[:, None] & reached[None, :]
            more = tl.load(
                before + m[:, None] * before_row + k[None, :], mask=known_inputs, other=0.0
            )
            a = sum_with_norm(a, x_factor[:, None], more, x_weight, x_offset, k, reached)
            stored_by = known_inputs & (tile == 0)  # no branch: it would end the pipeline
            tl.store(total_out + m[:, None] * K + k[None, :], a, mask=stored_by)
        w = tl.load(w_at + k[None, :], mask=known, other=0.0)
        if CENTERED:
            a = centered_inputs(a, mean, factor, norm_weight, norm_bias, k, reached, WEIGHTED)
            if DOT:
                a = a.to(w.dtype)
        if NORM:
            wide = a.to(tl.float32)
            if gate is not None:
                z = tl.load(
                    gate + m[:, None] * gate_row + k[None, :],
                    mask=(m < rows)[:, None] & reached[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                opened = z * sigmoid(z) if SILU else sigmoid(z)
                if GATE_FIRST:
                    wide *= opened
            if GROUP > 0 and GROUP <= BLOCK_K:
                groups = tl.reshape(wide, [BLOCK_M, BLOCK_K // GROUP, GROUP])
                factors = 1 / tl.sqrt_rn(tl.sum(groups * groups, axis=2) / GROUP + eps)
                wide = tl.reshape(groups * factors[:, :, None], [BLOCK_M, BLOCK_K])
            elif gate is not None:  # the sum keeps the tile as loaded, not copied for each warp
                total += tl.sum(wide * wide, axis=1)
            else:
                square += wide * wide
            if WEIGHTED:
                gain = tl.load(norm_weight + k, mask=reached, other=0.0).to(tl.float32) + offset
                wide = wide * gain[None, :]
            if gate is not None and not GATE_FIRST:
                wide *= opened
            a = wide.to(w.dtype) if DOT else wide
        if UPCAST or not DOT:
            a = a.to(tl.float32)
            w = w.to(tl.float32)
        if DOT:
            acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
        else:
            acc += w * a
        if GATED:
            u = tl.load(up_at + k[None, :], mask=known, other=0.0)
            if UPCAST or not DOT:
                u = u.to(tl.float32)
            if DOT:
                up_acc = tl.dot(a, tl.trans(u), up_acc, input_precision=PRECISION)
            else:
                up_acc += u * a
    y = acc if DOT else tl.sum(acc, axis=1)[None, :]
    up = up_acc if DOT else tl.sum(up_acc, axis=1)[None, :]
    total += tl.sum(square, axis=1)
    if GROUP > BLOCK_K:
        of_part = (1 / tl.sqrt_rn(total / GROUP + eps))[:, None]
        y *= of_part
        up *= of_part
    row = m.to(tl.int64)[:, None]
    stored = (m < rows)[:, None] & inside[None, :]
    is_done = True
    if SPLITS > 1:
        WIDTH: tl.constexpr = 2 * N if GATED else N
        tiles = (N + BLOCK_N - 1) // BLOCK_N
        at = partial + row * WIDTH + n[None, :]
        own = part * rows * WIDTH
        tl.store(at + own, y, mask=stored)
        if GATED:
            tl.store(at + N + own, up, mask=stored)
        squares_at = squares
        if NORM and GROUP == 0:
            squares_at = squares + tile * rows + m
            tl.store(squares_at + part * tiles * rows, total, mask=m < rows)
        is_done = is_last(counter + tile, SPLITS)
    if is_done:
        if SPLITS > 1:
            y = sum_of_parts(at, rows * WIDTH, stored, SPLITS)
            if GATED:
                up = sum_of_parts(at + N, rows * WIDTH, stored, SPLITS)
            if NORM and GROUP == 0:
                total = sum_of_parts(squares_at, tiles * rows, m < rows, SPLITS)
        if NORM and GROUP == 0:
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
            more = tl.load(residual + row * residual_row + n[None, :], mask=stored, other=0.0)
            y += more.to(tl.float32)
        tl.store(out + row * N + n[None, :], y.to(out.dtype.element_ty), mask=stored)
    return is_done, total


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x, weight, bias, norm_weight, norm_bias, gate, residual, before, x_weight, out, total_out,
    partial, squares, counter, rows, x_row, weight_row, gate_row, residual_row, before_row, eps,
    offset, x_eps, x_offset,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    WEIGHTED: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    SILU: tl.constexpr, GATE_FIRST: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr,
    CENTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each tile and part of the depth; the arguments are those of `linear_tile`."""
    tile, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        prefetch_tile(weight, weight_row, tile, part * SPLIT_K, N, K, BLOCK_N, BLOCK_K, GATED)
        wait_for_previous()
    linear_tile(
        tile, part, x, weight, bias, norm_weight, residual, out, partial, squares, counter, rows,
        x_row, weight_row, residual_row, eps, offset,
        N, K, SPLITS, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_K, NORM, WEIGHTED, BIAS, ACT, GATED,
        ADD, DOT, PRECISION, UPCAST, gate, gate_row, SILU, GATE_FIRST, GROUP, AHEAD, CENTERED,
        norm_bias, before, x_weight, total_out, before_row, x_eps, x_offset,
    )  # fmt: skip


def plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None,
    eps: float | None, offset: float, act: str | None, residual: Tensor | None,
    gate: Tensor | None = None, gate_act: str = "silu", gate_first: bool = False, group: int = 0,
    gated: bool = True, centered: bool = False, norm_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Plan[Tensor]:  # fmt: skip
    """For up to FUSED_ROWS rows. `out`, contiguous, may be the residual itself: each program reads
    the values of its tile before it writes them."""
    depth = x.shape[-1]
    base = plan_without_gate(
        few_rows_kernel, x, weight, bias, norm_weight, eps, offset, act, residual,
        0 if gate is None else group, gated, centered, out,
    )  # fmt: skip
    (launch,) = base.launches
    is_pipelined = not launch.constants["DOT"] and launch.num_stages > 1
    gates = None if gate is None else gate.reshape(-1, depth)
    launch = replace(
        launch,
        args={
            **launch.args, "norm_bias": norm_bias, "gate": gates,
            "gate_row": 0 if gates is None else gates.stride(0), **norm.NO_SUM,
        },
        constants={
            **launch.constants, "SILU": gate_act == "silu", "GATE_FIRST": gate_first,
            "GROUP": 0 if gate is None or group == depth else group,
            "AHEAD": launch.num_stages if is_pipelined else None, "CENTERED": centered,
        },
    )  # fmt: skip
    return Plan(out=base.out, launches=(launch,))


def sum_plan(
    x: Tensor, residual: Tensor, x_weight: Tensor | None, x_eps: float, x_offset: float,
    weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float | None,
    offset: float, act: str | None, gated: bool = True,
) -> Plan[tuple[Tensor, Tensor]]:  # fmt: skip
    """`norm_add_linear` for up to CENTERED_ROWS rows."""
    linear = plan(x, weight, bias, norm_weight, eps, offset, act, None, gated=gated)
    (launch,) = linear.launches
    if launch.constants["DOT"] and launch.constants["GATED"]:
        # two weights and two inputs of several rows would need more than the registers there are,
        # and than the 99 KiB of shared memory of consumer GPUs
        depth = min(launch.constants["BLOCK_K"], 256 // weight.element_size())
        launch = replace(launch, constants={**launch.constants, "BLOCK_K": depth})
    linear = replace(linear, launches=(launch,))
    return norm.with_sum(linear, x, residual, x_weight, x_eps, x_offset)


def plan_without_gate(
    kernel: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None,
    eps: float | None, offset: float, act: str | None, residual: Tensor | None, group: int = 0,
    gated: bool = True, centered: bool = False, out: Tensor | None = None,
) -> Plan[Tensor]:  # fmt: skip
    """A launch of a kernel that calls `linear_tile`, without the arguments for a norm's gate or
    bias. `group`: of the gated norm that the caller adds, otherwise 0."""
    depth, gated = x.shape[-1], gated and act is not None
    channels = weight.shape[0] // (2 if gated else 1)
    flat = x.reshape(-1, depth)
    rows = flat.shape[0]
    more = None if residual is None else residual.reshape(rows, channels)
    config = _config(rows, weight, gated, group)
    assert config is not None, "`takes` tells"
    tiles = config.tiles
    like = weight if residual is None else residual
    out = like.new_empty(*x.shape[:-1], channels) if out is None else out
    pdl = dependent_launch.applies_to(x.device)
    blocks = cdiv(channels, tiles.block_n)
    partial = squares = None
    if config.splits > 1:
        partial = x.new_empty(config.splits, rows, weight.shape[0], dtype=torch.float32)
        if eps is not None and not centered:
            squares = x.new_empty(config.splits, blocks, rows, dtype=torch.float32)
    launch = Launch(
        kernel=kernel,
        grid=(blocks, config.splits),
        args={
            "x": flat, "weight": weight, "bias": bias, "norm_weight": norm_weight,
            "residual": more, "out": out, "partial": partial, "squares": squares,
            "counter": counters(x.device, blocks), "rows": rows, "x_row": flat.stride(0),
            "weight_row": weight.stride(0),
            "residual_row": 0 if more is None else more.stride(0), "eps": eps or 0.0,
            "offset": offset,
        },
        constants={
            "N": channels, "K": depth, "SPLITS": config.splits, "SPLIT_K": config.split_k,
            "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
            "NORM": eps is not None and not centered, "WEIGHTED": norm_weight is not None,
            "BIAS": bias is not None, "ACT": act, "GATED": gated, "ADD": more is not None,
            "DOT": rows > 1, "PRECISION": dot_precision(weight.dtype),
            "UPCAST": needs_upcast(weight.dtype), "PDL": pdl,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def _config(rows: int, weight: Tensor, gated: bool, group: int) -> LinearConfig | None:
    """`gated`: the activation; `group`: of a gated norm, otherwise 0."""
    channels, depth = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    processors = multiprocessors(weight.device)
    itemsize = weight.element_size()
    if group:
        size = 2 * itemsize if gated else itemsize
        return gated_rows_config(rows, channels, depth, group, size, processors)
    return few_rows_config(rows, channels, depth, itemsize, gated, processors)


def takes(
    x: Tensor, weight: Tensor, eps: float | None, gate: Tensor | None = None, group: int = 0,
    gated: bool = False, centered: bool = False,
) -> bool:  # fmt: skip
    """Whether one kernel computes these rows. `gated`: the activation."""
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= (CENTERED_ROWS if centered else FUSED_ROWS):
        return False
    if prefers_library(*weight.shape):
        return False
    if gate is not None and (not eps or _config(rows, weight, gated, group) is None):
        return False
    # a float16 row before normalization times the norm's weight can overflow float16
    return weight.dtype != torch.float16 or eps is None or centered


def _normalized(
    x: Tensor, weight: Tensor, norm_weight: Tensor | None, eps: float, offset: float,
    gate: Tensor | None, gate_act: str, gate_first: bool, group: int, centered: bool,
    norm_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    if gate is None:
        x = x.to(weight.dtype)
        return norm.plan(x, norm_weight, eps, offset, centered, norm_bias).run()
    given = (eps, offset, gate_act, gate_first, group, weight.dtype)
    return gated_rms_norm.plan(x, gate, norm_weight, *given).run()


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None,
    eps: float | None, offset: float, act: str | None, residual: Tensor | None,
    gate: Tensor | None = None, gate_act: str = "silu", gate_first: bool = False, group: int = 0,
    gated: bool = True, centered: bool = False, norm_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    of_gate, of_mean = (gate, gate_act, gate_first, group), (centered, norm_bias)
    linear = x, weight, bias, norm_weight, eps, offset, act, residual
    if takes(x, weight, eps, gate, group, gated and act is not None, centered):
        return plan(*linear, *of_gate, gated, *of_mean).run()
    if eps is not None:
        x = _normalized(x, weight, norm_weight, eps, offset, *of_gate, *of_mean)
        return run(x, weight, bias, None, None, 0.0, act, residual, gated=gated)
    alike = residual is not None and residual.dtype == weight.dtype
    if residual is not None and alike and bias is None and act is None:
        # rounded once; torch copies the residual to where the product adds to it
        flat = residual.reshape(-1, weight.shape[0])
        return torch.addmm(flat, x.reshape(-1, weight.shape[1]), weight.t()).view(residual.shape)
    y = F.linear(x, weight, bias)
    if act is not None:
        y = act_mul.plan_activation(y, act, gated).run()
    return y if residual is None else y + residual


def _run_add(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None,
    eps: float | None, offset: float, act: str | None,
    gate: Tensor | None = None, gate_act: str = "silu", gate_first: bool = False, group: int = 0,
    gated: bool = True, centered: bool = False, norm_bias: Tensor | None = None,
) -> None:  # fmt: skip
    of_gate, of_mean = (gate, gate_act, gate_first, group), (centered, norm_bias)
    linear = x, weight, bias, norm_weight, eps, offset, act
    if not out.is_contiguous():
        out.copy_(run(*linear, out, *of_gate, gated, *of_mean))
    elif takes(x, weight, eps, gate, group, gated and act is not None, centered):
        plan(*linear, out, *of_gate, gated, *of_mean, out=out).run()
    elif eps is not None:
        x = _normalized(x, weight, norm_weight, eps, offset, *of_gate, *of_mean)
        _run_add(out, x, weight, bias, None, None, 0.0, act, gated=gated)
    elif bias is None and act is None and out.dtype == weight.dtype:
        # rounded once, and the product adds to `out` itself
        out.view(-1, weight.shape[0]).addmm_(x.reshape(-1, weight.shape[1]), weight.t())
    else:
        out += run(*linear, None, gated=gated)


def run_sum(
    x: Tensor, residual: Tensor, x_weight: Tensor | None, x_eps: float, x_offset: float,
    weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float | None,
    offset: float, act: str | None, gated: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_x, of_sum = (x_weight, x_eps, x_offset), (norm_weight, eps, offset)
    rows = x.numel() // x.shape[-1]
    if rows <= CENTERED_ROWS and takes(x, weight, eps):
        return sum_plan(x, residual, *of_x, weight, bias, *of_sum, act, gated).run()
    y, total = norm.sum_of_norm(x, residual, *of_x, *of_sum)
    return run(y, weight, bias, None, None, 0.0, act, None, gated=gated), total


def _run_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return run(x, weight, bias, None, None, 0.0, None, None)


def _supports(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    gate: Tensor | None = None,
    norm_bias: Tensor | None = None,
    **others: object,
) -> bool:
    tensors = (x, weight, bias, norm_weight, residual, out, gate, norm_bias)
    # norms round their results to the weight's dtype
    rounded = x if others.get("eps") is None else None
    sums = (residual, out)
    are_sums = all(t is None or t.dtype in (weight.dtype, torch.float32) for t in sums)
    return supports_tensors(*tensors) and same_dtype(rounded, weight, bias) and are_sums


def _sum_supports(
    *, x: Tensor, residual: Tensor, x_weight: Tensor | None, weight: Tensor, bias: Tensor | None,
    norm_weight: Tensor | None, **others: object,
) -> bool:  # fmt: skip
    fits = norm.supports(x=x, weight=x_weight) and x.shape == residual.shape
    tensors = (residual, weight, bias, norm_weight)
    return fits and supports_tensors(*tensors) and same_dtype(x, residual, weight, bias)


define(fused_linear, run=run, supports=_supports)
define(add_linear, run=_run_add, supports=_supports)
define(norm_add_linear, run=run_sum, supports=_sum_supports)
define(linear, run=_run_linear, supports=_supports)
