"""Low-bit weights: what quantizing loses, and the C++ op at every row count, format and edge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import op_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_threads import torch_threads

from llmc.kernels.quantized_linear import (
    EXACT_BITS,
    FORMATS,
    TABLES,
    Format,
    Quantization,
    _to_blocks,
    dequantize,
    mxfp4_draw,
    pack_groups,
    pack_weight,
    quantization_of,
    quantize,
    quantized_linear,
    round_to_fp8,
    supports_bits,
)

# of a weight's standard deviation, for normally distributed weights
MAX_ERROR = {"int8": 0.012, "fp8": 0.03, "int4": 0.115}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kept_as(format: Format, n: int, k: int) -> Quantization:
    to = quantization_of(format, n, k)
    assert to is not None
    return to


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with torch_threads(request.param) as count:
        yield count


@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_loses_no_more_than_its_bits(format: Format) -> None:
    weight = rand(64, 256)
    q, scale = quantize(weight, kept_as(format, 64, 256))
    error = (dequantize(q, scale) - weight).pow(2).mean().sqrt()
    assert 0 < error < MAX_ERROR[format]


@pytest.mark.parametrize("format", FORMATS)
def test_values_on_the_grid_come_back(format: Format) -> None:
    """And so do a channel of zeros, and channels of very different sizes."""
    to = kept_as(format, 32, 64)
    weight = dequantize(*quantize(rand(32, 64) * torch.logspace(-6, 6, 32)[:, None], to))
    weight[3] = 0
    again = dequantize(*quantize(weight, to))
    torch.testing.assert_close(again, weight, rtol=1e-6, atol=0)


def test_shapes_follow_from_the_format() -> None:
    assert kept_as("int4", 32, 256) == Quantization(format="int4", group=128, scale="bfloat16")
    assert kept_as("int4", 32, 96).group == 32
    assert kept_as("int8", 32, 96).group == 0
    assert quantization_of("fp8", 32, 48) is None
    for format in FORMATS:
        to = kept_as(format, 48, 192)
        weight, scale = quantize(rand(48, 192), to)
        assert (tuple(weight.shape), weight.dtype) == (to.shape("weight", 48, 192), to.dtype)
        assert (tuple(scale.shape), scale.dtype) == (to.shape("scale", 48, 192), to.scale_dtype)
        assert weight.is_contiguous() and scale.is_contiguous()


@pytest.mark.parametrize("format", FORMATS)
def test_the_last_channel_fills_its_block(format: Format) -> None:
    to, rows = kept_as(format, 21, 64), rand(21, 64)
    parts = quantize(rows, to)
    assert tuple(parts[0].shape) == to.shape("weight", 21, 64) == to.shape("weight", 32, 64)
    assert tuple(parts[1].shape) == to.shape("scale", 21, 64)
    got = dequantize(*parts)
    assert torch.equal(got[:16], dequantize(*quantize(rows[:16], to)))
    assert torch.equal(got[21:], got[20:21].expand(11, -1))


def test_layout_by_hand() -> None:
    """A line holds four bytes of each of 16 channels; the lower half of a byte comes first."""
    weight = torch.zeros(1, 2, 64, dtype=torch.uint8)
    weight[0, 1, 4 * 3 + 2] = 0x1F  # channel 3, inputs 8 + 2 * 2 and the one after
    scale = torch.full((1, 1, 16), 0.5, dtype=torch.bfloat16)
    got = dequantize(weight, scale, torch.zeros(1, 1, 16, dtype=torch.uint8))
    assert (float(got[3, 12]), float(got[3, 13])) == (7.5, 0.5)
    assert int((got != 0).sum()) == 2
    assert float(dequantize(weight, scale)[3, 12]) == 3.5, "8 stands for zero"


def grouped(format: Format, n: int, k: int, group: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weight, scale and zero as checkpoints have them: every code, scales of groups in float32."""
    to = Quantization(format=format, group=group, scale="float32", zero=format == "int4")
    gen = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, to.shape("weight", n, k), generator=gen, dtype=torch.uint8)
    if format == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    scale = 0.01 + 0.01 * torch.rand(to.shape("scale", n, k), generator=gen)
    zero = None
    if to.zero:
        zero = torch.randint(0, 16, scale.shape, generator=gen, dtype=torch.uint8)
    return codes.view(to.dtype), scale, zero


def run(x: Tensor, weight: Tensor, scale: Tensor, *rest: Tensor | None) -> Tensor:
    op_cases.require_cpu_ops()
    zero, bias = [*rest, None, None][:2]
    out: Tensor = torch.ops.llmc_cpu.quantized_linear(x, weight, scale, zero, bias)
    return out


def assert_near(got: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> None:
    """One rounding of the exact result, and before it what inputs in 16 bits lose (few rows), or,
    with tiles, weights rounded to bf16 (six deviations of a sum of errors up to 2^-9 of each
    product). There, above 192 rows, the library multiplies, which may round twice."""
    w, x = dequantize(weight, scale).double(), x.double()
    want = x @ w.T
    if len(x) <= 16:
        room = 2**-14 * x.abs().amax(1, keepdim=True) * w.pow(2).sum(1).sqrt()
    else:
        room = 6 * 2**-9 * (x.pow(2) @ w.pow(2).T).sqrt()
    assert got.shape == want.shape
    rounding = 2**-8 * 1.02 if len(x) <= 192 else 2**-7
    assert float(((got.double() - want).abs() - rounding * want.abs() - room).max()) <= 0


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 9, 16, 40])
def test_rare_codes_of_fp8_among_plain_ones(rows: int) -> None:
    """NaN, zeros and subnormal values, which kernels may read in another way than the others."""
    values = torch.linspace(0.1, 400, 32 * 64).view(32, 64)
    values[3, 5], values[9, 40], values[17, 63], values[30, 0] = 0, 2**-9, -7 * 2**-9, float("nan")
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    weight = _to_blocks(codes, 4).view(torch.float8_e4m3fn)
    scale = torch.ones(2, 1, 16)
    x = torch.randint(-3, 4, (rows, 64), generator=torch.Generator().manual_seed(0)).float()
    got, want = run(x, weight, scale), x @ codes.view(torch.float8_e4m3fn).float().T
    assert bool(got[:, 30].isnan().all()), "NaN times 0 too"
    want[:, 30] = got[:, 30]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-2, equal_nan=True)


@cache
def drawn(format: Format, n: int, k: int) -> tuple[Tensor, Tensor]:
    """A weight for many tests, which only read it: (codes, scale)."""
    return quantize(rand(n, k) * k**-0.5, kept_as(format, n, k))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 12, 13, 17, 40, 200])
def test_every_row_count(format: Format, rows: int, threads: int) -> None:
    for k, n in ((256, 80), (1056, 2080)):
        weight, scale = drawn(format, n, k)
        x = rand(rows, k, seed=1).bfloat16()
        assert_near(run(x, weight, scale), x, weight, scale)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 8, 17, 50])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_scales_of_groups(format: Format, rows: int, group: int) -> None:
    weight, scale, zero = grouped(format, 80, 384, group)
    for dtype in op_cases.DTYPES:
        x = rand(rows, 384, seed=1).to(dtype)
        got = run(x, weight, scale, zero)
        want = quantized_linear.reference(x, weight, scale, zero, None)
        room = op_cases.TOLERANCE[dtype] | {"atol": float(want.abs().max()) * 2**-8}
        if dtype == torch.float32:
            room["atol"] = float(want.abs().max()) * 1e-6
        torch.testing.assert_close(got, want, **room)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    steps=st.integers(1, 9),
    blocks=st.integers(1, 7),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(op_cases.DTYPES),
    extras=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 9),
)
def test_random_shapes(
    rows: int,
    steps: int,
    blocks: int,
    format: Format,
    dtype: torch.dtype,
    extras: tuple[bool, bool],
    seed: int,
) -> None:
    n, k = 16 * blocks, 32 * steps
    weight, scale = quantize(rand(n, k, seed=seed) * k**-0.5, kept_as(format, n, k))
    zero = None
    if format == "int4" and extras[0]:
        zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8)
    bias = rand(n, seed=seed + 1).to(dtype) if extras[1] else None
    x = rand(rows, k, seed=seed + 2).to(dtype)
    got = run(x, weight, scale, zero, bias)
    want = quantized_linear.reference(x, weight, scale, zero, bias)
    torch.testing.assert_close(got, want, **op_cases.TOLERANCE[dtype])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 20])
def test_an_input_far_larger_than_the_others(format: Format, rows: int) -> None:
    """Activations have such channels; what the others add must not be lost."""
    weight, scale = quantize(rand(32, 256) * 0.1, kept_as(format, 32, 256))
    x = rand(rows, 256, seed=1)
    x[:, 5] = 2000.0
    x = x.bfloat16()
    assert_near(run(x, weight, scale), x, weight, scale)


@pytest.mark.parametrize("group", [32, 256])
@pytest.mark.parametrize("rows", [1, 2, 4, 6, 8, 16, 40])
def test_what_zero_points_cancel_leaves_no_error(rows: int, group: int) -> None:
    """Of ternary weights, whose codes 7 to 9 times inputs of one sign add up to far more than the
    result. The bound is on errors relative to the sum of magnitudes, in roundings of float32."""
    gen = torch.Generator().manual_seed(0)
    to = Quantization(format="int4", group=group, scale="float16", zero=False)
    codes = torch.randint(7, 10, (64, 256), generator=gen, dtype=torch.uint8)
    weight = pack_weight(codes, to)
    scale = pack_groups(torch.full((64, 256 // group), 0.05, dtype=torch.float16))
    x = 1 + 0.1 * torch.randn(rows, 256, generator=gen)
    w = dequantize(weight, scale).double()
    error = (run(x, weight, scale) - x.double() @ w.T).abs() / (x.double().abs() @ w.abs().T)
    assert float(error.max()) * 2**24 < (16 if rows == 1 else 4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [2, 5, 40])
def test_a_bad_row_spoils_no_other(format: Format, rows: int) -> None:
    weight, scale = quantize(rand(48, 64), kept_as(format, 48, 64))
    x = rand(rows, 64).bfloat16()
    clean = run(x, weight, scale)
    x[rows // 2, 7] = float("nan")
    got = run(x, weight, scale)
    assert bool(got[rows // 2].isnan().all())
    others = torch.arange(rows) != rows // 2
    assert torch.equal(got[others], clean[others])
    x[rows // 2, 7] = float("inf")
    assert not bool(run(x, weight, scale)[rows // 2].isfinite().any())


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_counts_as_what_it_is(format: Format) -> None:
    """Checkpoints hold codes that `quantize` never gives, such as -128 and NaN."""
    to = kept_as(format, 16, 64)
    shape = to.shape("weight", 16, 64)
    weight = torch.arange(math.prod(shape)).to(torch.uint8).view(shape).view(to.dtype)
    scale = torch.ones(to.shape("scale", 16, 64), dtype=to.scale_dtype)
    for rows in (1, 7, 33):
        x = rand(rows, 64).bfloat16()
        got = run(x, weight, scale)
        want = quantized_linear.reference(x, weight, scale, None, None)
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("format", [format for format in TABLES if format != "mxfp4"])
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_codes_stand_for_the_values_of_their_table(format: Format, rows: int) -> None:
    """Each of the sixteen, in each place of a line."""
    to = Quantization(format=format, group=32)
    q = (torch.arange(16)[:, None] + torch.arange(64)) % 16
    weight, scale = pack_weight(q.to(torch.uint8), to), torch.ones(1, 2, 16)
    values = torch.tensor(TABLES[format], dtype=torch.float32)[q]
    assert (tuple(weight.shape), weight.dtype) == (to.shape("weight", 16, 64), to.dtype)
    assert torch.equal(dequantize(weight, scale), values)
    x = torch.randint(-8, 9, (rows, 64), generator=torch.Generator().manual_seed(0)).float()
    for bits in (EXACT_BITS, 16):
        for dtype in op_cases.DTYPES:
            op_cases.require_cpu_ops()
            got = torch.ops.llmc_cpu.quantized_linear(
                x.to(dtype), weight, scale, None, None, None, bits
            )
            torch.testing.assert_close(got, (x @ values.T).to(dtype))


def test_strides_and_nothing_to_do() -> None:
    weight, scale = quantize(rand(32, 64), kept_as("int8", 32, 64))
    x = rand(6, 128).bfloat16()[:, :64]
    assert torch.equal(run(x, weight, scale), run(x.contiguous(), weight, scale))
    assert run(x.reshape(2, 3, 64), weight, scale).shape == (2, 3, 32)
    assert run(x[:0], weight, scale).shape == (0, 32)


def test_wrong_arguments_are_named() -> None:
    weight, scale = quantize(rand(32, 64), kept_as("int8", 32, 64))
    x = rand(2, 64).bfloat16()
    with pytest.raises(RuntimeError, match=r"has 64 inputs and does not fit x \[2, 60\]"):
        run(x[:, :60], weight, scale)
    with pytest.raises(RuntimeError, match=r"scale \[2, 8, 16\] does not fit"):
        run(x, weight, torch.ones(2, 8, 16))
    with pytest.raises(RuntimeError, match="scale must be float32"):
        run(x, weight, scale.double())
    with pytest.raises(
        RuntimeError, match="weight must be int8, uint8, float8_e4m3fn or float8_e5m2"
    ):
        run(x, weight.to(torch.int16), scale)
    with pytest.raises(RuntimeError, match="bias must be a dense"):
        run(x, weight, scale, None, torch.zeros(31).bfloat16())
    for dtype in (torch.uint8, torch.int8):  # iq3_s and iq3_xxs, which have no groups of 16
        some = torch.zeros(2, 2, 256, dtype=dtype)
        with pytest.raises(RuntimeError, match=r"scale \[2, 4, 16\] does not fit"):
            run(x, some, torch.ones(2, 4, 16))
    with pytest.raises(RuntimeError, match="comes with uint8 weights only"):
        run(x, weight, scale, torch.zeros(2, 1, 16, dtype=torch.uint8))


def identity(depth: int, group: int) -> tuple[Tensor, Tensor]:
    """(weight, scale) in fp8 of a linear that returns its inputs."""
    to = Quantization(format="fp8", group=group)
    return quantize(torch.eye(depth) * 448, to)[0], torch.full(
        to.shape("scale", depth, depth), 1 / 448
    )


@pytest.mark.parametrize("group", [0, 32, 128])
def test_inputs_in_fp8_are_rounded_as_checkpoints_state(group: int) -> None:
    """Scales of the largest magnitude over 448, and torch's own rounding to nearest."""
    x = rand(7, 256) * torch.logspace(-3, 3, 256)
    parts = x.unflatten(1, (-1, group or 256))
    scale = parts.abs().amax(2, keepdim=True) / 448
    want = ((parts / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)
    assert torch.equal(round_to_fp8(x, group or 256), want)
    assert 0.01 < float((want - x).norm() / x.norm()) < 0.04
    weight, scales = identity(256, group)
    out = quantized_linear.reference(x, weight, scales, None, None, None, 8)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=0)


def test_inputs_are_divided_by_tensors() -> None:
    """On GPUs, torch multiplies by the reciprocal of a number instead: other codes at ties."""

    class Divisions(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func.overloadpacket is torch.ops.aten.div:
                divisors.append(args[1])
            return func(*args, **(kwargs or {}))

    divisors: list[Any] = []
    with Divisions():
        round_to_fp8(torch.randn(3, 64), 32)
    assert len(divisors) == 2
    assert all(isinstance(by, torch.Tensor) and by.dim() > 0 for by in divisors)


@pytest.mark.parametrize("dtype", op_cases.DTYPES)
@pytest.mark.parametrize("group", [0, 32, 96])
def test_the_cpu_rounds_inputs_to_the_same_numbers(group: int, dtype: torch.dtype) -> None:
    op_cases.require_cpu_ops()
    weight, scales = identity(192, group)
    x = rand(8, 192) * torch.logspace(-2, 2, 192)
    x[1] = 0
    x[2, :96] = 1e-33
    x[3, 5], x[4, 100] = float("nan"), float("-inf")
    x = x.to(dtype)
    got = torch.ops.llmc_cpu.quantized_linear(x, weight, scales, None, None, None, 8)
    want = round_to_fp8(x.float(), group or 192).to(dtype)
    finite = [0, 1, 2, 5, 6, 7]
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-6, atol=0)
    assert got[3:5].isnan().all()
    assert want[3, :32].isnan().all() and want[4, 96:128].isnan().all()
    assert bool(want[4, :32].isnan().all()) == (group == 0), "others keep their scale"


def test_formats_have_their_own_bits_of_inputs() -> None:
    weight, scale = identity(192, 0)
    assert [supports_bits(weight, scale, bits) for bits in (8, 16)] == [8, EXACT_BITS]
    codes, exponents = mxfp4_draw(torch.Generator(), 16, 32)
    assert [supports_bits(codes, exponents, bits) for bits in (8, 16)] == [16, 16]
    by_32 = torch.ones(1, 2, 16)
    for format in TABLES:
        to = Quantization(format=format, group=32)
        some = torch.zeros(to.shape("weight", 16, 64), dtype=to.dtype)
        assert supports_bits(some, exponents if format == "mxfp4" else by_32, 8) == 16
    by_16 = torch.ones(12, 12, 16)
    assert supports_bits(weight, by_16, 8) == EXACT_BITS
    op_cases.require_cpu_ops()
    with pytest.raises(RuntimeError, match="scales are of 16 inputs"):
        torch.ops.llmc_cpu.quantized_linear(rand(2, 192), weight, by_16, None, None, None, 8)
    for rounded, scales, bits in ((weight, scale, 16), (codes, exponents, 8)):
        with pytest.raises(RuntimeError, match=f"x_bits must be 24, 8 for fp8.*got {bits}"):
            x = rand(2, rounded.shape[1] * (4 if rounded is weight else 8))
            torch.ops.llmc_cpu.quantized_linear(x, rounded, scales, None, None, None, bits)
