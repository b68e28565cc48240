"""Routed experts that a model's own code computes give the same numbers when led to our op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmc.compiler.expert_loops import _kinds, use_expert_loops
from llmc.compiler.experts import use_sorted_experts
from llmc.errors import CompileError

WIDTH, INNER, EXPERTS, SAME, TOP_K = 8, 6, 5, 3, 2


class Loop(nn.Module):
    """Experts in a loop over those that were hit; the last ones give back what they get."""

    def __init__(self, *, turned: bool = False, biased: bool = False, scaled: bool = False) -> None:
        super().__init__()
        self.turned, self.biased, self.scaled = turned, biased, scaled
        shape = (WIDTH, INNER) if turned else (INNER, WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, *shape))
        self.down = nn.Parameter(torch.randn(EXPERTS * WIDTH, INNER))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        mask = F.one_hot(top_k_index, num_classes=EXPERTS + SAME).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = int(hit.item())
            place, token = torch.where(mask[expert].squeeze(0))
            state = hidden_states[token]
            if expert < EXPERTS:
                up = self.up[expert]
                state = F.silu(state.matmul(up) if self.turned else F.linear(state, up))
                down = self.down.view(EXPERTS, WIDTH, INNER)[hit[0]]
                bias = self.bias[expert] if self.biased else None
                state = F.linear(state, down, bias)
                if self.scaled:
                    state = state * self.bias[expert]
            out.index_add_(0, token, state * top_k_weights[token, place, None])
        return out


def routed(tokens: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, EXPERTS + SAME, generator=gen)
    weights, index = scores.topk(TOP_K)
    return torch.randn(tokens, WIDTH, generator=gen), index, weights


@pytest.mark.parametrize("options", [{}, {"turned": True}, {"biased": True}])
def test_a_loop_is_done_for_all_rows(options: dict[str, Any]) -> None:
    experts = Loop(**options)
    given = routed()
    want = experts(*given)
    use_expert_loops(experts)
    torch.testing.assert_close(experts(*given), want)


def test_experts_whose_code_differs_are_told_apart() -> None:
    assert [kind.first for kind in _kinds(Loop())] == [0, EXPERTS]


def test_equal_modules_share_one_function() -> None:
    pair = nn.ModuleList([Loop(), Loop()])
    use_expert_loops(pair)
    first, second = (m.forward for m in pair)
    assert first.__func__ is second.__func__


def test_a_weight_that_is_no_linear_is_refused_by_name() -> None:
    with pytest.raises(CompileError, match="Loop computes its experts in a loop that can't"):
        use_expert_loops(Loop(scaled=True))


class Linear(nn.Module):
    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, narrow, wide))

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        parts = inputs.split(expert_size, dim=0)
        return torch.cat([F.linear(x, w) for x, w in zip(parts, self.weight, strict=True)])


class Sorted(nn.Module):
    """Rows sorted by expert, whose numbers are read out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(WIDTH, INNER)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        order = expert.argsort()
        expert_size = F.one_hot(expert, EXPERTS).sum(0)
        expert_size = expert_size.tolist()
        return self.linear(x[order], expert_size)


def test_sorted_rows_keep_their_counts_in_a_tensor() -> None:
    model, gen = Sorted(), torch.Generator().manual_seed(0)
    x, expert = torch.randn(9, WIDTH, generator=gen), torch.tensor([3, 0, 0, 4, 3, 3, 0, 4, 1])
    want = model(x, expert)
    use_sorted_experts(model)
    torch.testing.assert_close(model(x, expert), want)
