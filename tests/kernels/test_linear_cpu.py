"""The C++ `linear`: against float64, at the edges of tiles, and with memory around the rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import op_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_threads import torch_threads

_CPUINFO = Path("/proc/cpuinfo")
_FLAGS = _CPUINFO.read_text().split() if _CPUINFO.exists() else []
TILES = "amx_bf16" in _FLAGS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # relative, once
ROWS = (1, 2, 3, 4, 5, 8, 10, 11, 15, 16, 17, 18, 24, 33, 64, 100, 192, 193)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    op_cases.require_cpu_ops()


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with torch_threads(request.param) as count:
        yield count


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.llmc_cpu.linear(x, weight, bias)
    return out


def make(
    rows: int, k: int, n: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, k, generator=gen), torch.randn(n, k, generator=gen) * k**-0.5
    return x.to(dtype), weight.to(dtype), torch.randn(n, generator=gen).to(dtype)


def assert_exact(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within one rounding of the float64 result, and float32's own error."""
    want = x.double() @ weight.double().T
    want = want if bias is None else want + bias.double()
    assert got.dtype == x.dtype and got.is_contiguous()
    # the library's own tiles, which may round twice
    is_library = TILES and x.dtype == torch.bfloat16 and len(got) > 192 and got.shape[1] >= 16
    rtol, atol = (2**-6, 2**-6) if is_library else (ROUNDING[x.dtype] * 1.02, 2e-5)
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_each_sum_is_rounded_once(rows: int, dtype: torch.dtype, threads: int) -> None:
    for k, n in ((1024, 96), (992, 80), (65, 47)):
        x, weight, bias = make(rows, k, n, dtype=dtype)
        assert_exact(linear(x, weight), x, weight)
        assert_exact(linear(x, weight, bias), x, weight, bias)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70),
    k=st.integers(1, 150),
    n=st.integers(1, 120),
    has_bias=st.booleans(),
    is_transposed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_random_shapes(
    rows: int, k: int, n: int, has_bias: bool, is_transposed: bool, dtype: torch.dtype, seed: int
) -> None:
    x, weight, bias = make(rows, k, n, seed, dtype)
    weight = weight.T.contiguous().T if is_transposed else weight
    given_bias = bias if has_bias else None
    assert_exact(linear(x, weight, given_bias), x, weight, given_bias)


@pytest.mark.parametrize("rows", [1, 3, 20, 200])
def test_memory_around_the_rows_is_not_summed(rows: int) -> None:
    x, weight, bias = make(rows, 77, 53)
    wide_x = torch.full((rows, 100), float("nan"), dtype=torch.bfloat16)
    wide_w = torch.full((60, 100), float("inf"), dtype=torch.bfloat16)
    wide_x[:, 3:80], wide_w[:53, 5:82] = x, weight
    assert_exact(linear(wide_x[:, 3:80], wide_w[:53, 5:82], bias), x, weight, bias)


def test_more_rows_than_are_packed_at_once(threads: int) -> None:
    """And a last part of each size: dot products, half a panel, both, a whole one."""
    for rows in (514, 520, 522, 527):
        x, weight, bias = make(rows, 1100, 48)
        assert_exact(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("rows", [2, 5, 40, 200])
@pytest.mark.parametrize("k", [77, 80, 96])
def test_a_bad_row_spoils_no_other(rows: int, k: int) -> None:
    x, weight, _ = make(rows, k, 64)
    clean = linear(x, weight)
    x[rows // 2] = float("nan")
    got = linear(x, weight)
    assert bool(got[rows // 2].isnan().all())
    others = torch.arange(rows) != rows // 2
    assert torch.equal(got[others], clean[others])


def test_leading_dimensions_and_strides() -> None:
    x, weight, bias = make(12, 64, 40)
    for view in (x.view(1, 12, 64), x.view(2, 3, 2, 64), x.view(3, 4, 64).transpose(0, 1), x[::3]):
        got = linear(view, weight, bias)
        assert got.shape == (*view.shape[:-1], 40)
        assert_exact(got.view(-1, 40), view.reshape(-1, 64), weight, bias)
    assert linear(x[0], weight).shape == (40,)
    assert torch.equal(linear(x[0], weight), linear(x[:1], weight)[0])
    assert torch.equal(linear(x[:1].expand(5, 64), weight)[4], linear(x[:5], weight)[0])
    assert torch.equal(linear(x.T.contiguous().T, weight), linear(x, weight))


def test_nothing_to_do() -> None:
    x, weight, bias = make(4, 32, 20)
    assert linear(x[:0], weight, bias).shape == (0, 20)
    assert linear(x, weight[:0]).shape == (4, 0)
    assert_exact(
        linear(x[::2, ::2], weight[::2, ::2], bias[::2]), x[::2, ::2], weight[::2, ::2], bias[::2]
    )


def test_calls_from_several_threads_keep_their_packed_rows_apart() -> None:
    from concurrent.futures import ThreadPoolExecutor

    cases = [make(5 + i, 256, 512, i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for case, got in zip(cases, pool.map(lambda c: linear(*c), cases), strict=True):
                assert_exact(got, *case)


def test_wrong_arguments_are_named() -> None:
    x, weight, bias = make(2, 32, 20)
    with pytest.raises(RuntimeError, match=r"weight \[20, 32\] does not fit x \[2, 31\]"):
        linear(x[:, :31], weight)
    with pytest.raises(RuntimeError, match="bias must have 20 elements, got 19"):
        linear(x, weight, bias[:19])
