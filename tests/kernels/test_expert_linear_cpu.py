"""The C++ `expert_linear` at routed shapes: many experts, few rows each, weights turned or not."""

from __future__ import annotations

import op_cases
import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    op_cases.require_cpu_ops()


def run(x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, turned: bool) -> Tensor:
    out: Tensor = torch.ops.llmc_cpu.expert_linear(x, weight, bias, expert, turned)
    return out


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("k,n", [(64, 48), (96, 770), (33, 17)])
def test_top_eight_of_many(rows: int, k: int, n: int, dtype: torch.dtype, turned: bool) -> None:
    """Experts that no row picked hold NaN: reading one would show."""
    gen = torch.Generator().manual_seed(rows)
    picks = torch.stack([torch.randperm(12, generator=gen)[:8] for _ in range(rows)]).flatten() * 10
    weight = torch.full((128, k, n) if turned else (128, n, k), float("nan"), dtype=dtype)
    bias = torch.full((128, n), float("nan"), dtype=dtype)
    for e in picks.unique().tolist():
        weight[e] = (torch.randn(weight.shape[1:], generator=gen) * k**-0.5).to(dtype)
        bias[e] = torch.randn(n, generator=gen).to(dtype)
    x = torch.randn(len(picks), k, generator=gen).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7 if dtype == torch.bfloat16 else 2**-10
    w = weight[picks].double() if turned else weight[picks].double().transpose(1, 2)
    want = torch.einsum("rk,rkn->rn", x.double(), w) + bias[picks].double()
    torch.testing.assert_close(
        run(x, weight, bias, picks, turned).double(), want, rtol=tolerance, atol=tolerance
    )
    assert run(x, weight, None, picks, turned).isfinite().all()
