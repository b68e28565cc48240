"""The C++ ops of routed experts: many experts, few rows each, weights turned or not; routers."""

from __future__ import annotations

import op_cases
import pytest
import torch
from torch import Tensor
from torch_threads import torch_threads


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


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 9, 90])
def test_results_do_not_depend_on_threads(tokens: int, dtype: torch.dtype, turned: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 96, generator=gen).to(dtype)
    weight = torch.randn(12, *((96, 1100) if turned else (1100, 96)), generator=gen).to(dtype)
    expert = torch.randint(0, 12, (3 * tokens,), generator=gen)
    results = []
    for threads in (1, 2, 5):
        with torch_threads(threads):
            results.append(run(x, weight, None, expert, turned))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("experts, count", [(5, 5), (64, 6), (77, 1)])
def test_the_first_of_equal_logits_is_chosen(experts: int, count: int) -> None:
    gen = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (40, experts), generator=gen).float()
    ordered = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    weight, expert = torch.ops.llmc_cpu.choose_experts(logits, None, count, False, torch.float32)
    assert torch.equal(expert, ordered)
    torch.testing.assert_close(weight, logits.softmax(-1).gather(1, ordered))


def test_a_router_whose_logits_are_not_numbers_chooses_experts_that_exist() -> None:
    logits = torch.tensor(
        [[float("nan")] * 6, [float("-inf")] * 6, [1.0, float("nan"), 2, 3, 4, 5]]
    )
    weight, expert = torch.ops.llmc_cpu.choose_experts(logits, None, 3, True, torch.float32)
    assert expert.tolist() == [[0, 1, 2], [0, 1, 2], [1, 5, 4]] and weight.isnan().all()


@pytest.mark.parametrize("experts, groups, kept", [(24, 3, 2), (60, 6, 1), (7, 1, 1), (10, 5, 5)])
def test_experts_of_the_best_groups_are_chosen(experts: int, groups: int, kept: int) -> None:
    gen = torch.Generator().manual_seed(0)
    logits, correction = torch.randn(40, experts, generator=gen), torch.randn(experts)
    given = (logits, None, 2, True, torch.float32, correction.half(), "sigmoid", groups, kept)
    weight, expert = torch.ops.llmc_cpu.choose_experts(*given, 0.1, 3.0)
    ranked = logits.sigmoid() + correction.half().float()
    for token in range(40):
        parts = ranked[token].split(experts // groups)
        order = sorted(range(groups), key=lambda g: -sum(parts[g].sort().values[-2:].tolist()))
        known = [g * len(parts[0]) + i for g in order[:kept] for i in range(len(parts[0]))]
        assert expert[token].tolist() == sorted(known, key=lambda e: -ranked[token, e])[:2]
    scores = logits.sigmoid().gather(1, expert)
    torch.testing.assert_close(weight, 3 * scores / (scores.sum(1, keepdim=True) + 0.1))


def test_bad_arguments_are_refused() -> None:
    x, weight, expert = torch.randn(4, 32), torch.randn(3, 16, 32), torch.zeros(8, dtype=torch.long)
    ops = torch.ops.llmc_cpu
    for wrong in (
        lambda: run(x, weight, None, expert[:7], False),
        lambda: run(x, weight, None, expert.int(), False),
        lambda: run(x, weight, torch.randn(3, 15), expert, False),
        lambda: run(x, weight.bfloat16(), None, expert, False),
        lambda: run(x, weight, None, expert, True),
        lambda: ops.choose_experts(x, None, 33, True, torch.float32),
        lambda: ops.choose_experts(x, expert, 2, True, torch.float32),
        lambda: ops.choose_experts(x, None, 2, True, torch.float32, None, "tanh"),
        lambda: ops.choose_experts(x, None, 2, True, torch.float32, torch.ones(31)),
        lambda: ops.choose_experts(x, None, 2, True, torch.float32, None, "sigmoid", 5, 2),
        lambda: ops.choose_experts(x, None, 5, True, torch.float32, None, "sigmoid", 8, 1),
        lambda: ops.choose_experts(x, None, 1, True, torch.float32, None, "sigmoid", 32, 1),
        lambda: ops.sum_experts(x, torch.ones(3, 2), torch.float32),
        lambda: ops.sum_experts(x, torch.ones(2, 2), torch.float32, x),
    ):
        with pytest.raises(RuntimeError):
            wrong()
