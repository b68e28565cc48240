"""`linear` from float32 products, where a CPU has none of 16-bit floats and no C++ ops."""

from __future__ import annotations

import op_cases
import pytest
import torch

from llmc.kernels.cpu import levels, widen_linear
from llmc.kernels.linear import linear

PRESENT = {"torch"}  # no C++ ops
FLAGS = {"bfloat16": "avx512_bf16", "float16": "avx512_fp16"}


@pytest.fixture(params=sorted(FLAGS))
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """One that this processor seems to have no products of, but those of the other one."""
    flags = "avx2 " + " ".join(flag for name, flag in FLAGS.items() if name != request.param)
    monkeypatch.setattr(levels, "cpu_facts", lambda: {"flags": flags})
    dtype: torch.dtype = getattr(torch, request.param)
    return dtype


def test_equals_the_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widen_linear, "_FEW_ROWS", 1)
    monkeypatch.setattr(widen_linear, "_BLOCK", 256)  # so most weights are several blocks
    for case in op_cases.cases("linear", dtype):
        impl = linear.best(case, present=PRESENT)
        assert impl is not None and impl.name == "torch"
        got, want = impl.op()(*case), linear.reference(*case)
        assert got.dtype == dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, **op_cases.TOLERANCE[dtype])


def test_few_rows_are_torchs_own_and_more_are_not(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own reads the weight once for each row, which is no slower for up to three."""
    products = list[torch.dtype]()
    given = widen_linear.F.linear

    def recorded(x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        products.append(x.dtype)
        return given(x, *others)

    monkeypatch.setattr(widen_linear.F, "linear", recorded)
    weight = torch.randn(8, 16, dtype=dtype)
    for rows, used in ((1, dtype), (3, dtype), (4, torch.float32)):
        products.clear()
        widen_linear.widen_linear(torch.randn(1, rows, 16, dtype=dtype), weight, None)
        assert products == [used], rows


def test_only_where_the_processor_lacks_the_products(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(op_cases.cases("linear", dtype))
    other = next(t for t in widen_linear._NAMES if t != dtype)
    assert linear.best(case, present=PRESENT) is not None
    for unchanged in (other, torch.float32):
        wanted = [None if t is None else t.to(unchanged) for t in case]
        assert linear.best(wanted, present=PRESENT) is None
    for facts in ({}, {"Features": "asimd"}):  # neither known to be x86
        monkeypatch.setattr(levels, "cpu_facts", lambda facts=facts: facts)
        assert linear.best(case, present=PRESENT) is None
