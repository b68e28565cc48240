"""The linears in Triton under its interpreter: random shapes, divided depths, experts not picked.

Run by test_ops_triton.py, for the same reason as interpreted_ops.py.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import bench_package  # noqa: F401 - makes `bench` importable
import fast_interpreter  # noqa: F401 - the tests take a fraction of the time
import op_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from bench import tune
from bench.linear_work import ways_work
from llmc.kernels.quantized_linear import (
    EXACT_BITS,
    FORMATS,
    Format,
    Quantization,
    Scale,
    dequantize,
    mxfp4_draw,
    quantization_of,
    quantize,
    round_to_fp8,
)
from llmc.kernels.registry import OPS
from llmc.kernels.triton import dequantize as triton_dequantize
from llmc.kernels.triton import (
    expert_linear,
    fused_linear,
    linear_configs,
    quantized_expert_linear,
    quantized_linear,
    quantized_rows,
    scaled_linear,
)
from llmc.kernels.triton import (
    route as triton_route,
)
from llmc.kernels.triton.counters import counters
from llmc.kernels.triton.launch import Launch, Plan
from llmc.kernels.triton.linear_configs import FUSED_ROWS, WideConfig, wide_config

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
    rows=st.integers(1, FUSED_ROWS),
    k=st.integers(1, 700),
    n=st.integers(1, 40),
    act=st.sampled_from([None, "silu", "gelu_tanh"]),
    extras=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_few_rows(
    rows: int, k: int, n: int, act: str | None, extras: tuple[bool, bool, bool, bool, bool]
) -> None:
    biased, normed, weighted, added, gated = extras
    channels = 2 * n if act and gated else n
    case = (
        rand(rows, k),
        rand(channels, k, seed=1) * k**-0.5,
        rand(channels, seed=2) if biased else None,
        rand(k, seed=3) if normed and weighted else None,
        1e-5 if normed else None,
        0.5,
        act,
        rand(rows, n, seed=4) if added else None,
        None,
        "silu",
        False,
        0,
        gated,
    )
    assert_equals_reference("fused_linear", fused_linear.plan(*case), case)


@few
@given(
    rows=st.integers(1, FUSED_ROWS),
    k=st.one_of(st.integers(1, 700), st.integers(2000, 2300)),
    n=st.integers(1, 40),
    mean=st.sampled_from([0.0, 3.0, 1000.0]),
    extras=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_few_rows_after_a_layer_norm(
    rows: int, k: int, n: int, mean: float, extras: tuple[bool, bool, bool]
) -> None:
    """Also where squares of the inputs would be a million times their variance."""
    weighted, shifted, gated = extras
    case = (
        rand(rows, k).double().add(mean).float(),
        rand(2 * n if gated else n, k, seed=1) * k**-0.5,
        None,
        rand(k, seed=3) if weighted else None,
        1e-5,
        0.0,
        "silu" if gated else None,
        None,
        None,
        "silu",
        False,
        0,
        gated,
        True,
        rand(k, seed=5) if shifted else None,
    )
    want = OPS["fused_linear"].reference(*case)
    got = fused_linear.plan(*case).run()
    error = 1e-3 if mean > 3 else 2e-5  # that of the inputs themselves, in float32
    torch.testing.assert_close(got, want, rtol=error, atol=error)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels, as they are launched."""
    names: list[str] = []
    run = Launch.run

    def recorded(launch: Launch) -> None:
        names.append(launch.kernel.__name__)
        run(launch)

    monkeypatch.setattr(Launch, "run", recorded)
    return names


@pytest.mark.parametrize("rows", [1, 4, FUSED_ROWS])
@pytest.mark.parametrize(("act", "gated"), [(None, False), ("silu", True), ("gelu", False)])
def test_a_deep_linear_is_divided_and_sums_are_the_same_every_time(
    rows: int, act: str | None, gated: bool
) -> None:
    case = (
        rand(rows, 2100), rand(32, 2100, seed=1) * 0.02, rand(32, seed=2), rand(2100, seed=3), 1e-6,
        0.0, act, rand(rows, 16 if gated else 32, seed=4), None, "silu", False, 0, gated,
    )  # fmt: skip
    plan = fused_linear.plan(*case)
    assert plan.launches[0].grid[-1] > 1
    assert_equals_reference("fused_linear", plan, case)
    first = plan.out.clone()
    assert torch.equal(plan.run(), first)  # as a graph is replayed: the counters are zero again
    assert torch.equal(fused_linear.plan(*case).run(), first)
    assert not counters(CPU, 1).any()


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("depth", [4096, 4100, 9000])
@pytest.mark.parametrize("rows", [1, 2])
def test_one_row_of_a_deep_linear_is_loaded_ahead(rows: int, depth: int, act: str | None) -> None:
    """Also if the last tile ends beyond the weight. What Triton makes of it shows when it is
    compiled (test_triton_aot.py), and the op's cases run it on GPUs."""
    case = (
        rand(rows, depth), rand(20, depth, seed=1) * depth**-0.5, rand(20, seed=2),
        rand(depth, seed=3), 1e-6, 0.0, act, rand(rows, 20 if act is None else 10, seed=4),
    )  # fmt: skip
    plan = fused_linear.plan(*case)
    (launch,) = plan.launches
    assert launch.constants["AHEAD"] == (launch.num_stages if rows == 1 else None)
    assert launch.num_stages == 3 or rows > 1
    assert (depth % launch.constants["BLOCK_K"] == 0) == (depth == 4096)
    assert_equals_reference("fused_linear", plan, case)


@few
@given(
    rows=st.integers(1, FUSED_ROWS),
    groups=st.integers(1, 5),
    group=st.sampled_from([8, 32, 64, 128, 192, 256, 320, 512, 1088]),
    n=st.integers(1, 70),
    gate_act=st.sampled_from(["silu", "sigmoid"]),
    extras=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_few_rows_after_a_gated_norm(
    rows: int,
    groups: int,
    group: int,
    n: int,
    gate_act: str,
    extras: tuple[bool, bool, bool, bool],
) -> None:
    """Tiles that hold several groups, parts that are one, and one group over several parts."""
    weighted, added, first, gated = extras
    k, act, channels = groups * group, "gelu" if gated else None, 2 * n if gated else n
    x, gate = (
        rand(rows, k) * 10 ** rand(rows, groups, seed=5).repeat_interleave(group, 1),
        rand(rows, 2 * k, seed=6),
    )
    case = (
        x,
        rand(channels, k, seed=1) * k**-0.5,
        None,
        rand(k, seed=3) if weighted else None,
        1e-5,
        0.5,
        act,
        rand(rows, n, seed=4) if added else None,
        gate[:, k:],
        gate_act,
        first,
        group,
    )
    assert fused_linear.takes(x, case[1], 1e-5, gate, group, gated)
    assert_equals_reference("fused_linear", fused_linear.plan(*case), case)


def test_other_groups_are_normalized_by_their_own_kernel() -> None:
    for rows, k, group, taken in (
        (1, 96, 24, False),  # neither a power of two nor enough inputs for a tile of its own
        (8, 32 * 320, 320, False),  # too many parts
        (17, 64, 16, False),
        (16, 64, 16, True),
    ):
        assert fused_linear.takes(rand(rows, k), rand(8, k), 1e-5, rand(1), group) == taken


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


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_last_part_of_a_low_bit_weight_sees_the_whole_norm(
    format: Format, rows: int, act: str | None, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever that is: it adds the parts of both halves and of the squares."""
    if backward:
        run_backward(monkeypatch)
    to = quantization_of(format, 64, 2176)
    assert to is not None
    drawn = quantize(rand(64, 2176) * 0.02, to)
    around = (rand(2176, seed=3), 1e-5, 1.0, act, rand(rows, 64 if act is None else 32, seed=1))
    case = (rand(rows, 2176), *drawn, None, rand(64, seed=2), None, *around)
    plan = quantized_linear.plan(*case)
    assert plan.launches[0].grid[-1] > 1
    assert_equals_reference("fused_quantized_linear", plan, case)
    first = plan.out.clone()
    assert torch.equal(plan.run(), first)
    assert not counters(CPU, 1).any()


@pytest.mark.parametrize(
    ("rows", "dtype", "act", "kernels"),
    [
        (FUSED_ROWS, torch.bfloat16, "silu", ["low_bit_kernel"]),
        (
            FUSED_ROWS + 1, torch.bfloat16, "silu",
            ["norm_kernel", "low_bit_kernel", "act_mul_kernel"],
        ),
        (FUSED_ROWS + 1, torch.bfloat16, None, ["norm_kernel", "low_bit_kernel"]),
        (FUSED_ROWS, torch.bfloat16, "relu", ["low_bit_kernel"]),
        (FUSED_ROWS + 1, torch.bfloat16, "relu", ["norm_kernel", "low_bit_kernel"]),
        (300, torch.bfloat16, "relu", ["norm_kernel", "dequantize_kernel", "act_mul_kernel"]),
        # times the norm's weight, a row can overflow
        (3, torch.float16, None, ["norm_kernel", "low_bit_kernel"]),
        (300, torch.bfloat16, None, ["norm_kernel", "dequantize_kernel"]),
    ],
)  # fmt: skip
def test_a_low_bit_linear_is_one_kernel_for_few_rows(
    rows: int, dtype: torch.dtype, act: str | None, kernels: list[str], launched: list[str]
) -> None:
    to = quantization_of("int4", 64, 96)
    assert to is not None
    drawn = quantize(rand(64, 96) * 0.1, to)
    x, gain = rand(rows, 96).to(dtype), rand(96, seed=1).to(dtype)
    gated = act == "silu"
    residual = rand(rows, 32 if gated else 64, seed=2).to(dtype)
    case = (x, *drawn, None, None, None, gain, 1e-5, 0.0, act, residual, gated)
    got = torch.ops.llmc_triton.fused_quantized_linear(*case)
    assert launched == kernels
    want = OPS["fused_quantized_linear"].reference(*case)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


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


def any_codes(
    to: Quantization, n: int, k: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Every code, NaN included: (weight, scale, zero, minimum)."""
    gen = torch.Generator().manual_seed(n + k)
    if to.format == "mxfp4":
        return *mxfp4_draw(gen, n, k), None, None
    codes = torch.randint(0, 256, to.shape("weight", n, k), generator=gen, dtype=torch.uint8)
    scale = 0.5 + torch.rand(to.shape("scale", n, k), generator=gen)
    zero = torch.randint(0, 16, scale.shape, generator=gen, dtype=torch.uint8) if to.zero else None
    minimum = scale - 1 if to.minimum else None
    return codes.view(to.dtype), scale.to(to.scale_dtype), zero, minimum


@pytest.mark.parametrize("depth", [96, 1056])
@pytest.mark.parametrize(
    ("format", "group", "scale", "extra"),
    [
        ("int4", 32, "bfloat16", "zero"),
        ("int4", 16, "float32", "minimum"),
        ("int4", 32, "float16", ""),
        ("int8", 0, "float32", ""),
        ("int8", 16, "float32", "minimum"),
        ("fp8", 0, "float32", ""),
        ("fp8", 32, "float16", ""),
        ("mxfp4", 32, "exponent", ""),
        ("nvfp4", 16, "float32", ""),
        ("iq4", 32, "float16", ""),
        ("iq3_s", 32, "float32", ""),
        ("iq3_xxs", 32, "float16", ""),
        ("iq2", 16, "float32", ""),
    ],
)
def test_a_weight_is_dequantized_exactly(
    format: Format, group: int, scale: Scale, extra: str, depth: int
) -> None:
    to = Quantization(
        format=format, group=group, scale=scale, zero=extra == "zero", minimum=extra == "minimum"
    )
    parts = any_codes(to, 48, depth)
    want = dequantize(*parts)
    for dtype in (torch.float32, torch.bfloat16):
        got = triton_dequantize.plan(*parts, torch.empty(48, depth, dtype=dtype)).run()
        torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("at_once", [16, 32, 80])
def test_many_rows_are_multiplied_by_some_channels_at_a_time(
    at_once: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_dequantize, "WIDE_BYTES", at_once * 64 * 4)
    weight, scale, zero, _ = any_codes(Quantization(format="int4", group=32, zero=True), 80, 64)
    x, bias = rand(2, 5, 64), rand(80, seed=1) if biased else None
    want = OPS["quantized_linear"].reference(x, weight, scale, zero, bias)
    got = triton_dequantize.wide_linear(x, weight, scale, zero, bias, None)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_slabs_are_whole_blocks_within_the_scratch() -> None:
    for channels, depth in ((151936, 4096), (28672, 8192), (4096, 14336), (16, 64)):
        step = triton_dequantize.slab(channels, 2 * depth)
        parts = list(triton_dequantize.slabs(channels, step))
        assert sum(count for _, count in parts) == channels and step % 16 == 0
        assert [start for start, _ in parts] == list(range(0, channels, step))
        assert 2 * depth * step <= triton_dequantize.WIDE_BYTES + 2 * depth * 16
        assert min(count for _, count in parts) > 0.9 * step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_of_every_format(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*given: Any) -> Tensor:
        calls.append(given)
        return triton_dequantize.wide_linear(*given)

    monkeypatch.setattr(linear_configs, "WIDE_ROWS", 33)
    monkeypatch.setattr(quantized_rows, "wide_linear", counted)
    cases = [c for c in op_cases.cases("quantized_linear", dtype) if c[0].dim() == 2]
    many = [c for c in cases if len(c[0]) > 20 and not op_cases.rounds("quantized_linear", c)]
    for case in many:
        want = OPS["quantized_linear"].reference(*case)
        got = torch.ops.llmc_triton.quantized_linear(*case)
        torch.testing.assert_close(got, want, **op_cases.TOLERANCE[dtype])
    float8 = {torch.float8_e4m3fn, torch.float8_e5m2}
    assert {c[1].dtype for c in many} == {torch.uint8, torch.int8, *float8}
    assert len(calls) == sum(len(c[0]) >= 33 for c in many) > 5


@pytest.mark.parametrize("codes", [False, True])
def test_a_measured_number_of_rows_is_that_from_which_weights_are_dequantized_once(
    codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = []
    for name in ("wide_linear", "scaled_linear"):
        way = partial(lambda name, x, *given: ways.append((name, len(x))) or x, name)
        monkeypatch.setattr(quantized_rows, name, way)
    key = wide_config.key((4, 2, codes), wide_config.rule(4, 2, codes))
    with tune.using({key: WideConfig(min_rows=70)}):
        for rows in (69, 70):
            x, *given, bits = float8_case(rows, 32, 96, 32, torch.bfloat16)
            given = [rand(*x.shape).bfloat16(), *given]
            torch.ops.llmc_triton.quantized_linear(*given, bits if codes else EXACT_BITS)
    assert ways == [("scaled_linear" if codes else "wide_linear", 70)]


def float8_case(rows: int, n: int, k: int, group: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of `quantized_linear`; NaN, infinity and zeros are among the inputs."""
    to = Quantization(format="fp8", group=group)
    weight, scale = quantize(rand(n, k) * k**-0.5, to)
    x = rand(rows, k, seed=1) * torch.logspace(-2, 2, k)
    x[0], x[1, :32] = 0, 1e-33
    x[2, 5], x[3, k - 1] = float("nan"), float("inf")
    return x.to(dtype), weight, scale, None, rand(n, seed=2).to(dtype), None, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 96, 192, 2880])
def test_inputs_in_fp8_are_rounded_exactly(group: int, dtype: torch.dtype) -> None:
    x = float8_case(7, 16, 2880, group % 2880, dtype)[0]
    want = round_to_fp8(x.float(), group)
    assert want.isnan().sum() == 2 * group
    got = scaled_linear.plan_rounded(x.view(1, 7, -1), group).run()
    torch.testing.assert_close(got[0], want.to(dtype), rtol=0, atol=0, equal_nan=True)
    codes, scale = scaled_linear.plan_codes(torch.cat((x, x), 1)[:, :2880], group).run()
    numbers = codes.float() * scale.repeat_interleave(group, 1)
    torch.testing.assert_close(numbers, want, rtol=0, atol=0, equal_nan=True)


def test_blocks_become_rows() -> None:
    weight, *_ = any_codes(Quantization(format="fp8"), 48, 2112)
    got = scaled_linear.plan_rows_of(weight).run()
    want = dequantize(weight, torch.ones(3, 1, 16))
    torch.testing.assert_close(got.float(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "n", "k", "group"),
    [(5, 48, 96, 0), (130, 16, 160, 0), (9, 144, 256, 128), (6, 32, 192, 96), (4, 16, 64, 32)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_multiplied(
    rows: int, n: int, k: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = float8_case(rows, n, k, group, dtype)
    want = OPS["quantized_linear"].reference(*case)
    assert want[2:4].isnan().all() and want[4:].isfinite().all()
    x, weight, scale, _, bias, *_ = case
    got = scaled_linear.scaled_linear(x, weight, scale, bias)
    tolerance = op_cases.TOLERANCE[dtype] | (
        {"rtol": 2e-5, "atol": 2e-4} if dtype == torch.float32 else {}
    )
    torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
    monkeypatch.setattr(triton_dequantize, "WIDE_BYTES", 16 * k)  # one block of channels at a time
    parts = scaled_linear.scaled_linear(x.view(1, rows, k), weight, scale, bias)
    # not equal to `got`: the interpreter's products (numpy's) sum in an order that depends on their
    # width on some CPUs
    torch.testing.assert_close(parts[0], want, equal_nan=True, **tolerance)


@pytest.mark.parametrize("at_once", [16, 48])
def test_the_library_multiplies_the_same_codes(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, scale, _, bias, *_ = case = float8_case(32, 48, 64, 0, torch.bfloat16)
    calls = []

    def counted(*given: Any) -> Tensor:
        calls.append(given)
        return product(*given)

    product = scaled_linear.library_product
    codes = torch.ones(16, 32).to(torch.float8_e4m3fn)
    try:
        product(codes, torch.ones(16, 1), codes, torch.ones(1, 1, 16), None)
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__} has no such product for CPUs: {error}")
    monkeypatch.setattr(scaled_linear, "library_scales", lambda device: True)
    monkeypatch.setattr(scaled_linear, "library_product", counted)
    monkeypatch.setattr(triton_dequantize, "WIDE_BYTES", at_once * 64)
    got = scaled_linear.scaled_linear(x, weight, scale, bias)
    assert len(calls) == 48 // at_once
    want = OPS["quantized_linear"].reference(*case)
    torch.testing.assert_close(got, want, equal_nan=True, **op_cases.TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("rows", [4, 12, 20])
@pytest.mark.parametrize("has_products", [True, False])
def test_rounding_does_not_depend_on_the_number_of_rows(
    rows: int, has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*given: Any) -> Tensor:
        calls.append(given)
        return scaled_linear.scaled_linear(*given)

    monkeypatch.setattr(linear_configs, "SCALED_ROWS", 10)
    monkeypatch.setattr(linear_configs, "WIDE_ROWS", 15)
    monkeypatch.setattr(quantized_rows, "multiplies_codes", lambda device: has_products)
    monkeypatch.setattr(quantized_rows, "scaled_linear", counted)
    case = float8_case(rows, 48, 96, 32, torch.float32)
    got = torch.ops.llmc_triton.quantized_linear(*case)
    want = OPS["quantized_linear"].reference(*case)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=2e-5, atol=2e-4)
    assert len(calls) == (has_products and rows >= 10)


@pytest.mark.parametrize("format", ["int4", "int8", "fp8", "mxfp4"])
def test_experts_of_many_rows(format: Format) -> None:
    """For each expert a full tile of the largest size, and a part of one."""
    case = [c for c in op_cases.cases("quantized_expert_linear", torch.bfloat16)
            if c[1].dtype == Quantization(format=format).dtype and len(c) == 7
            and (c[2].dtype == torch.uint8) == (format == "mxfp4")][-1]  # fmt: skip
    experts = case[1].shape[0]
    rows = 300 * experts
    x = rand(rows, case[0].shape[1]).bfloat16()
    wide = (x, *case[1:5], torch.arange(rows) % experts, *case[6:])
    plan = quantized_expert_linear.plan(*wide)
    assert plan.launches[0].constants["BLOCK_M"] == 256
    want = OPS["quantized_expert_linear"].reference(*wide)
    torch.testing.assert_close(plan.run(), want, rtol=2e-2, atol=2e-2)


def float8_experts(
    rows: int, choices: int, n: int, k: int, group: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Arguments of `quantized_expert_linear`: three experts, and rows without one."""
    x, *_, bias, _, bits = float8_case(rows // choices, n, k, group, dtype)
    to = Quantization(format="fp8", group=group)
    parts = [quantize(rand(n, k, seed=e) * k**-0.5, to) for e in range(3)]
    weight, scale = (torch.stack(part) for part in zip(*parts, strict=True))
    expert = torch.randint(-1, 4, (rows,), generator=torch.Generator().manual_seed(rows))
    return x, weight, scale, None, torch.stack([bias] * 3), expert, None, bits


@pytest.mark.parametrize(
    ("rows", "choices", "n", "k", "group"),
    [(12, 1, 48, 96, 0), (10, 2, 16, 160, 0), (150, 1, 80, 256, 128), (60, 4, 32, 192, 96)],
)
@pytest.mark.parametrize(
    ("dtype", "has_products"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)],
)
def test_experts_multiply_codes(
    rows: int, choices: int, n: int, k: int, group: int, dtype: torch.dtype, has_products: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """GPUs without products of float8 multiply the same numbers, dequantized (in bfloat16, that
    rounds them once more)."""
    monkeypatch.setattr(quantized_expert_linear, "multiplies_codes", lambda device: has_products)
    assert_multiplies_codes(float8_experts(rows, choices, n, k, group, dtype), has_products)


@pytest.mark.parametrize("n", [64, 160, 48])
@pytest.mark.parametrize("rows", [10, 60])
@pytest.mark.parametrize("gate", [("silu",), ("quick_gelu", 0.75, 1.0, True)], ids=str)
def test_experts_multiply_codes_and_activate(
    rows: int, n: int, gate: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of codes has whole blocks of 16 gates, unless they are interleaved: a half of 24 gates
    takes the other kernel."""
    monkeypatch.setattr(quantized_expert_linear, "multiplies_codes", lambda device: True)
    x, *others = float8_experts(rows, 2, n, 64, 32, torch.float32)
    assert_multiplies_codes((x / 100, *others, None, None, *gate), n != 48 or len(gate) > 1)


def assert_multiplies_codes(case: tuple[Any, ...], expected: bool) -> None:
    want = OPS["quantized_expert_linear"].reference(*case)
    assert want.isnan().any() and want.isfinite().any()
    plan = quantized_expert_linear.plan(*case)
    assert len(plan.launches) == 2
    assert ("x_scale" in plan.launches[1].args) == expected
    plan.out.fill_(7.0)
    got = plan.run()
    tolerance = op_cases.TOLERANCE[want.dtype] | (
        {"rtol": 2e-5, "atol": 2e-4} if want.dtype == torch.float32 else {}
    )
    torch.testing.assert_close(got, want, equal_nan=True, **tolerance)


@pytest.mark.parametrize("format", FORMATS)
def test_the_bench_times_ways_with_the_same_result(format: Format) -> None:
    """In bfloat16, which dequantized weights are rounded to; inputs in fp8 differ by 3 %."""
    works = list(ways_work(format, 20, 256, 32, torch.device("cpu")))
    names = [work.case.partition("-> 32, ")[2] for work in works]
    in_fp8 = ["inputs in fp8", "inputs in fp8, groups"] if format == "fp8" else []
    assert names == ["in tiles", "dequantized once", *in_fp8]
    want, *others = (work.run().float() for work in works)
    for name, got in zip(names[1:], others, strict=True):
        error = float((got - want).norm() / want.norm())
        assert error < 0.005 if name == "dequantized once" else 0.005 < error < 0.05


def test_strided_rows() -> None:
    wide = rand(3, 200)
    case = (wide[:, 40:104], rand(24, 100)[:, :64], None, None, None, 0.0, None, wide[:, :24])
    assert_equals_reference("fused_linear", fused_linear.plan(*case), case)


@pytest.mark.parametrize("rows", [9, FUSED_ROWS, FUSED_ROWS + 1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("name", "act", "gated_norm"),
    [
        ("linear", None, False),
        *product(("fused_linear", "add_linear"), (None, "silu", "relu"), (False, True)),
    ],
)
def test_more_rows_go_to_the_library_and_nothing_is_lost_on_the_way(
    name: str, act: str | None, gated_norm: bool, biased: bool, rows: int, launched: list[str]
) -> None:
    gated = act == "silu"
    bias = rand(24) if biased else None
    linear = (rand(1, rows, 64), rand(24, 64), bias)
    others = (rand(64), 1e-5, 0.0, act)
    of_norm = (
        (rand(1, rows, 64, seed=2), "silu", True, 32) if gated_norm else (None, "silu", False, 0)
    )
    added = rand(1, rows, 12 if gated else 24, seed=1)
    op = getattr(torch.ops.llmc_triton, name)
    if name == "linear":
        got, want = op(*linear), OPS[name].reference(*linear)
    elif name == "fused_linear":
        case = (*linear, *others, added, *of_norm, gated)
        got, want = op(*case), OPS[name].reference(*case)
    else:
        got, want = added.clone(), added.clone()
        op(got, *linear, *others, *of_norm, gated)
        OPS[name].reference(want, *linear, *others, *of_norm, gated)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert ("few_rows_kernel" in launched) == (rows <= FUSED_ROWS)
    assert len(launched) == 1 or rows > FUSED_ROWS


def routed(rows: int, depth: int, experts: int) -> tuple[Any, ...]:
    """Arguments of `route`; the third token only pads the step."""
    slots = torch.arange(rows)
    slots[2:3] = -1
    return (
        rand(rows, depth), rand(depth, seed=1), 1e-5, 0.5, rand(experts, depth, seed=2),
        rand(experts, seed=3), slots, 2, True, torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("experts", "depth"), [(20, 2100), (2, 8192)], ids=["many tiles", "one tile, long rows"]
)
@pytest.mark.parametrize("backward", [False, True])
def test_the_last_program_of_a_router_chooses(
    rows: int, experts: int, depth: int, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever that is, and when a graph is replayed; padding has no expert."""
    if backward:
        run_backward(monkeypatch)
    case = routed(rows, depth, experts)
    plan = triton_route.plan(*case)
    (launch,) = plan.launches
    assert launch.constants["SPLITS"] > 1
    want = OPS["route"].reference(*case)
    for out in plan.out:
        out.fill_(7)
    first = [out.clone() for out in plan.run()]
    for mine, theirs in zip(first, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)
    assert (first[2][2:3] == experts).all() and (first[2][:2] < experts).all()
    assert all(torch.equal(a, b) for a, b in zip(plan.run(), first, strict=True))
    assert not counters(CPU, 1).any()


@pytest.mark.parametrize(
    ("rows", "experts", "depth", "dtype", "launches"),
    [
        (8, 64, 256, torch.bfloat16, 1),
        (4, 8, 4096, torch.bfloat16, 1),
        (5, 8, 4096, torch.bfloat16, 3),  # too long for the program of one tile of experts
        (2, 513, 64, torch.bfloat16, 3),
        (2, 64, 256, torch.float16, 3),  # times the norm's weight, a row can overflow
        (9, 64, 256, torch.bfloat16, 3),
        (17, 64, 256, torch.bfloat16, 2),  # and the library's product
    ],
)
def test_a_router_is_one_kernel_where_its_programs_have_little_else_to_do(
    rows: int, experts: int, depth: int, dtype: torch.dtype, launches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made: list[str] = []
    monkeypatch.setattr(Launch, "run", lambda launch: made.append(launch.kernel.__name__))
    case = (a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in routed(rows, depth, experts))  # fmt: skip
    triton_route.run(*case)
    assert len(made) == launches


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
    """From memory that holds NaN; few rows are not sorted, more than 1024 are."""
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
    assert_equals_reference("expert_linear", plan, case)


SUMMED = ("plain", "int8", "fp8 codes")


def summed_case(kind: str, tokens: int, count: int) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    """A product's op, and the arguments before and after those of the sum. Some choices, and of
    the last token all, are no experts."""
    rows, n, k = tokens * count, 160, 96
    expert = torch.randint(-1, 7, (rows,), generator=torch.Generator().manual_seed(rows))
    expert[-count:] = 6
    x, bias = rand(rows, k).bfloat16(), rand(6, n, seed=2).bfloat16()
    if kind == "plain":
        weight = (rand(6, n, k, seed=1) * k**-0.5).bfloat16()
        return "expert_linear", (x, weight, bias, expert, False), ()
    to = Quantization(format="int8" if kind == "int8" else "fp8")
    parts = [quantize(rand(n, k, seed=e) * k**-0.5, to) for e in range(6)]
    weight, scale = (torch.stack(part) for part in zip(*parts, strict=True))
    before = (x, weight, scale, None, bias, expert)
    return "quantized_expert_linear", before, (None, 8 if kind == "fp8 codes" else 24)


@pytest.mark.parametrize("kind", SUMMED)
@pytest.mark.parametrize(
    ("tokens", "count", "added"), [(1, 2, True), (3, 5, False), (8, 2, True), (9, 2, True)]
)
@pytest.mark.parametrize("backward", [False, True])
def test_few_rows_are_summed_by_the_last_program_as_by_a_second_kernel(
    kind: str, tokens: int, count: int, added: bool, backward: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Bit for bit, whichever program is last, and when a graph is replayed. A weight that is NaN is
    noticed, also of a token without experts."""
    monkeypatch.setattr(quantized_expert_linear, "multiplies_codes", lambda device: True)
    name, before, after = summed_case(kind, tokens, count)
    share = rand(tokens, count, seed=3)
    share[-1, 0] = float("nan")
    residual = rand(tokens, 200, seed=4).bfloat16()[:, :160] if added else None
    sums = (share, torch.bfloat16, residual)
    module = expert_linear if kind == "plain" else quantized_expert_linear
    rows = module.plan(*before, *after).run()
    want = torch.ops.llmc_triton.sum_experts(rows, *sums)
    assert want[-1].isnan().all() and want[:-1].isfinite().all()
    if backward:
        run_backward(monkeypatch)
    plan = module.plan_sum(*before, *sums, *after)
    assert len(plan.launches) == 1 + (tokens > 8) + (kind == "fp8 codes")
    for _ in range(2):
        plan.out.fill_(7)
        assert torch.equal(plan.run().nan_to_num(9), want.nan_to_num(9))
        assert not counters(CPU, 1).any()


def run_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the programs of a grid from the last one on."""
    builder = interpreter.interpreter_builder
    forward = builder.set_grid_idx
    monkeypatch.setattr(
        builder,
        "set_grid_idx",
        lambda x, *others: forward(builder.grid_dim[0] - 1 - x, *others),
    )


def test_tokens_without_experts_are_their_residual() -> None:
    residual, outside = rand(2, 24), torch.tensor([-1, 3, 9, 3])
    case = (rand(4, 20), rand(3, 24, 20), None, outside, False, rand(2, 2), torch.float32, residual)
    assert torch.equal(torch.ops.llmc_triton.sum_expert_linear(*case), residual)


@pytest.mark.parametrize(
    "others",
    [(0, 0), (300, 0), (0, 300), (16, 17), (1100, 0), (550, 550), (0, 1100)],
    ids="{0[0]} below and {0[1]} above".format,
)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("act", [None, "silu"])
def test_sorted_rows_without_an_expert_get_zeros(
    others: tuple[int, int], quantized: bool, act: str | None
) -> None:
    """All of them, some, or none; padding has the number of experts, other rows any number."""
    below, above = others
    inside = torch.arange(1100 - below - above) % 2
    expert = torch.cat((torch.full((below,), -3), inside, torch.full((above,), 2)))
    expert = expert[torch.randperm(1100, generator=torch.Generator().manual_seed(below))]
    x = rand(1100, 32)
    if quantized:
        to = Quantization(format="int8")
        drawn = rand(32, 32, seed=1) / 4
        weight, scale = (part.unflatten(0, (2, 1)) for part in quantize(drawn, to))
        case: tuple[Any, ...] = (x, weight, scale, None, None, expert, None, 24, None, None, act)
        plan = quantized_expert_linear.plan(*case)
        assert_equals_reference("quantized_expert_linear", plan, case)
    else:
        case = (x, rand(2, 16, 32, seed=1) / 4, None, expert, False, None, None, act)
        plan = expert_linear.plan(*case)
        assert_equals_reference("expert_linear", plan, case)
    outside = (expert < 0) | (expert >= 2)
    assert (plan.out[outside] == 0).all() and int(outside.sum()) == below + above
    assert len(plan.launches) == 1
