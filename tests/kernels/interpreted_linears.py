"""The linears in Triton under its interpreter: random shapes, divided depths, experts not picked.

Run by test_ops_triton.py, for the same reason as interpreted_ops.py.
"""

from __future__ import annotations

from typing import Any

import fast_interpreter  # noqa: F401 - the tests take a third of the time
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from llmc.kernels.quantized_linear import (
    FORMATS,
    Format,
    Quantization,
    dequantize,
    quantization_of,
    quantize,
)
from llmc.kernels.registry import OPS
from llmc.kernels.triton import expert_linear, fused_linear, quantized_linear
from llmc.kernels.triton.counters import counters
from llmc.kernels.triton.launch import Plan

CPU = torch.device("cpu")
few = settings(max_examples=25, deadline=None, derandomize=True)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_equals_reference(name: str, plan: Plan[Tensor], case: tuple[Any, ...]) -> None:
    want = OPS[name].reference(*case)
    plan.out.fill_(float("nan"))
    torch.testing.assert_close(plan.run(), want, rtol=2e-5, atol=2e-5)


@few
@given(
    rows=st.integers(1, 8),
    k=st.integers(1, 700),
    n=st.integers(1, 40),
    act=st.sampled_from([None, "silu", "gelu_tanh"]),
    extras=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_few_rows(
    rows: int, k: int, n: int, act: str | None, extras: tuple[bool, bool, bool, bool]
) -> None:
    biased, normed, weighted, added = extras
    channels = n if act is None else 2 * n
    case = (
        rand(rows, k),
        rand(channels, k, seed=1) * k**-0.5,
        rand(channels, seed=2) if biased else None,
        rand(k, seed=3) if normed and weighted else None,
        1e-5 if normed else None,
        0.5,
        act,
        rand(rows, n, seed=4) if added else None,
    )
    assert_equals_reference("fused_linear", fused_linear.plan(*case), case)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("act", [None, "silu"])
def test_a_deep_linear_is_divided_and_sums_are_the_same_every_time(
    rows: int, act: str | None
) -> None:
    case = (
        rand(rows, 2100), rand(32, 2100, seed=1) * 0.02, rand(32, seed=2), rand(2100, seed=3), 1e-6,
        0.0, act, rand(rows, 32 if act is None else 16, seed=4),
    )  # fmt: skip
    plan = fused_linear.plan(*case)
    assert plan.launches[0].grid[-1] > 1
    assert_equals_reference("fused_linear", plan, case)
    first = plan.out.clone()
    assert torch.equal(plan.run(), first)  # as a graph is replayed: the counters are zero again
    assert torch.equal(fused_linear.plan(*case).run(), first)
    assert not counters(CPU, 1).any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_deep_low_bit_weight_is_divided(format: Format, rows: int) -> None:
    to = quantization_of(format, 32, 2176)
    assert to is not None
    case = (rand(rows, 2176), *quantize(rand(32, 2176) * 0.02, to), None, rand(32, seed=2))
    plan = quantized_linear.plan(*case)
    assert plan.launches[0].grid[-1] > 1
    assert_equals_reference("quantized_linear", plan, case)
    first = plan.out.clone()
    assert torch.equal(plan.run(), first)
    assert not counters(CPU, 1).any()


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("format,group", [("int4", 16), ("int4", 128), ("int8", 16), ("int8", 32)])
def test_weights_far_from_zero_lose_what_bfloat16_weights_do(
    rows: int, format: Format, group: int
) -> None:
    """Against float64: one rounding of the result, and for several rows one of each weight."""
    to = Quantization(format=format, group=group, scale="float32", minimum=True)
    gen = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, to.shape("weight", 80, 256), generator=gen, dtype=torch.int8)
    scale = 0.5 + torch.rand(to.shape("scale", 80, 256), generator=gen)
    minimum = 200 * torch.rand(scale.shape, generator=gen)
    x = rand(rows, 256).bfloat16()
    plan = quantized_linear.plan(x, codes.view(to.dtype), scale, None, None, minimum)
    w = dequantize(codes.view(to.dtype), scale, None, minimum)
    want = x.double() @ (w if rows == 1 else w.bfloat16()).double().T
    sums = x.double().abs() @ w.double().abs().T  # of float32, whose errors are relative to them
    error = (plan.run().double() - want).abs()
    assert float((error - 2**-8 * 1.01 * want.abs() - 2**-21 * sums).max()) <= 0


def test_strided_rows() -> None:
    wide = rand(3, 200)
    case = (wide[:, 40:104], rand(24, 100)[:, :64], None, None, None, 0.0, None, wide[:, :24])
    assert_equals_reference("fused_linear", fused_linear.plan(*case), case)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", [None, "silu"])
def test_many_rows_go_to_the_library_and_nothing_is_lost_on_the_way(
    act: str | None, biased: bool
) -> None:
    residual = rand(1, 11, 24 if act is None else 12, seed=1)
    bias = rand(24) if biased else None
    case = (rand(1, 11, 40), rand(24, 40), bias, rand(40), 1e-5, 0.0, act, residual)
    got = torch.ops.llmc_triton.fused_linear(*case)
    torch.testing.assert_close(got, OPS["fused_linear"].reference(*case), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [8, 24])
def test_experts_that_no_row_picked_are_not_read(rows: int) -> None:
    """Top 8 of 128, as a routed layer decodes: the others hold NaN."""
    weight = torch.full((128, 16, 32), float("nan"))
    picked = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:8]
    weight[picked] = rand(8, 16, 32)
    expert = picked.repeat(rows // 8)
    got = torch.ops.llmc_triton.expert_linear(rand(rows, 32), weight, None, expert, False)
    want = torch.einsum("rk,rnk->rn", rand(rows, 32), weight[expert])
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 17, 150, 1025])
@pytest.mark.parametrize("experts", [3, 8])
def test_rows_find_their_experts_and_those_without_one_get_zeros(rows: int, experts: int) -> None:
    """Few rows without a sort, each from memory that holds NaN; more than 1024 are sorted."""
    gen = torch.Generator().manual_seed(rows)
    expert = torch.randint(-1, experts + 1, (rows,), generator=gen)
    case = (rand(rows, 20), rand(experts, 24, 20, seed=1), rand(experts, 24, seed=2), expert, False)
    plan = expert_linear.plan(*case)
    if rows == 150:  # few experts: tiles of 64 rows
        wide = [
            x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for x in case
        ]
        got, want = expert_linear.plan(*wide).run(), OPS["expert_linear"].reference(*wide)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    if rows > 1024:
        torch.testing.assert_close(
            plan.run(), OPS["expert_linear"].reference(*case), rtol=2e-5, atol=2e-5
        )
    else:
        assert_equals_reference("expert_linear", plan, case)
