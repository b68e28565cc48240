"""`gated_rms_norm` in Triton: a program normalizes one group of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.gated_rms_norm import gated_rms_norm
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.configs import row_warps
from llmc.kernels.triton.define import define, supports_tensors
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, power_of_2
from llmc.kernels.triton.state import sigmoid

_MAX_WIDTH = 65536


@triton.jit
def gated_norm_kernel(
    x, gate, weight, out, eps, offset, x_token, x_head, gate_token, gate_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SILU: tl.constexpr, GATE_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows are HEADS heads of each token; a row has WIDTH channels, in groups of GROUP."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    i = tl.arange(0, BLOCK)
    inside = i < GROUP
    channel = tl.program_id(1) * GROUP + i
    if PDL:
        wait_for_previous()
    y = tl.load(x + token * x_token + head * x_head + channel, mask=inside, other=0.0)
    z = tl.load(gate + token * gate_token + head * gate_head + channel, mask=inside, other=0.0)
    y, z = y.to(tl.float32), z.to(tl.float32)
    factor = sigmoid(z)
    if SILU:
        factor *= z
    if GATE_FIRST:
        y *= factor
    y *= 1 / tl.sqrt_rn(tl.sum(y * y, axis=0) / GROUP + eps)
    if weight is not None:
        y *= tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32) + offset
    if not GATE_FIRST:
        y *= factor
    tl.store(out + row * WIDTH + channel, y.to(out.dtype.element_ty), mask=inside)


def _by_head(x: Tensor) -> Tensor:
    """[1, T, H, N], [T, H, N], [1, T, N] or [T, N] -> [T, H, N], a view if the strides allow it.

    Rows without heads become one head: the kernel is compiled for H, which must not be T.
    """
    rows = x[0] if x.dim() > 2 and x.shape[0] == 1 else x
    return rows.reshape(-1, rows.shape[-2] if rows.dim() > 2 else 1, rows.shape[-1])


def plan(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    act: str,
    gate_first: bool,
    group: int,
    dtype: torch.dtype,
) -> Plan[Tensor]:
    out = x.new_empty(x.shape, dtype=dtype)
    by_head, gates = _by_head(x), _by_head(gate)
    tokens, heads, width = by_head.shape
    block = power_of_2(group)
    pdl = dependent_launch.applies_to(x.device)
    launch = Launch(
        kernel=gated_norm_kernel,
        grid=(tokens * heads, width // group),
        args={
            "x": by_head, "gate": gates, "weight": weight, "out": out, "eps": eps, "offset": offset,
            "x_token": by_head.stride(0), "x_head": by_head.stride(1),
            "gate_token": gates.stride(0), "gate_head": gates.stride(1),
        },
        constants={
            "HEADS": heads, "WIDTH": width, "GROUP": group, "BLOCK": block,
            "SILU": act == "silu", "GATE_FIRST": gate_first, "PDL": pdl,
        },
        num_warps=row_warps(block),
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def _supports(
    *, x: Tensor, gate: Tensor, weight: Tensor | None, group: int, **others: object
) -> bool:
    return supports_tensors(x, gate, weight) and group <= _MAX_WIDTH


define(gated_rms_norm, plan=plan, supports=_supports)
