"""`act_mul` and `activate` in Triton, for graphs that run uncompiled on a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.act_mul import ACTIVATIONS, QUICK, act_mul, activate
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.attention_kernel import tanh
from llmc.kernels.triton.configs import POINTWISE_BLOCK
from llmc.kernels.triton.define import define, supports_tensors
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2

_QUICK = tl.constexpr(QUICK)


@triton.jit
def activated(x, ACT: tl.constexpr):
    if ACT == "silu":
        return x / (1 + tl.exp(-x))
    elif ACT == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACT == "quick_gelu":
        return x / (1 + tl.exp(-_QUICK * x))
    elif ACT == "relu":
        return tl.where(x < 0, 0.0, x)  # NaN stays
    elif ACT == "relu2":
        return tl.where(x < 0, 0.0, x * x)
    else:
        tl.static_assert(ACT == "gelu_tanh")
        return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def gated(gate, up, ACT: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """`act_mul` of gates and what they multiply; NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return activated(gate, ACT) * (up + SHIFT)


@triton.jit
def act_mul_kernel(
    gate_up, out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr,
    LIMIT: tl.constexpr, SHIFT: tl.constexpr, INTERLEAVED: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    STRIDE: tl.constexpr = 2 if INTERLEAVED else 1
    at = gate_up + row * row_stride + i * STRIDE
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(at + (1 if INTERLEAVED else WIDTH), mask=inside, other=0.0).to(tl.float32)
        y = gated(y, up, ACT, LIMIT, SHIFT)
    else:
        y = activated(y, ACT)
    tl.store(out + row * WIDTH + i, y.to(out.dtype.element_ty), mask=inside)


def plan(
    gate_up: Tensor,
    act: str,
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
) -> Plan[Tensor]:
    return _plan(
        gate_up, gate_up.shape[-1] // 2,
        {"ACT": act, "LIMIT": limit, "SHIFT": shift, "INTERLEAVED": interleaved, "GATED": True},
    )  # fmt: skip


def plan_ungated(x: Tensor, act: str) -> Plan[Tensor]:
    return _plan(
        x, x.shape[-1],
        {"ACT": act, "LIMIT": None, "SHIFT": 0.0, "INTERLEAVED": False, "GATED": False},
    )  # fmt: skip


def plan_activation(x: Tensor, act: str, gated: bool) -> Plan[Tensor]:
    """`act_mul` of the two halves if gated, otherwise `activate`."""
    return plan(x, act) if gated else plan_ungated(x, act)


def _plan(x: Tensor, width: int, constants: dict[str, Any]) -> Plan[Tensor]:
    """`width`: channels of the result."""
    flat = x.reshape(-1, x.shape[-1])
    out = x.new_empty(*x.shape[:-1], width)
    block = min(POINTWISE_BLOCK, power_of_2(width))
    pdl = dependent_launch.applies_to(x.device)
    launch = Launch(
        kernel=act_mul_kernel,
        grid=(flat.shape[0], cdiv(width, block)),
        args={"gate_up": flat, "out": out, "row_stride": flat.stride(0)},
        constants={"WIDTH": width, "BLOCK": block, **constants, "PDL": pdl},
        pdl=pdl,
    )
    return Plan(out=out, launches=(launch,))


def _supports(*, gate_up: Tensor, act: str, **others: object) -> bool:
    return supports_tensors(gate_up) and act in ACTIVATIONS


def _supports_ungated(*, x: Tensor, act: str) -> bool:
    return supports_tensors(x) and act in ACTIVATIONS


define(act_mul, plan=plan, supports=_supports)
define(activate, plan=plan_ungated, supports=_supports_ungated)
