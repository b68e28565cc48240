"""Blocks whose code loops over experts give the same numbers when all tokens are done at once."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import own_experts
import pytest
import torch
import torch.nn.functional as F
from own_experts import EXPERTS, INNER, TOP_K, WIDTH, Block, Gated
from tiers import tiered
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from llmc.compiler.expert_blocks.use import use_expert_blocks
from llmc.errors import CompileError
from llmc.weights.stacked_experts import StackedExperts, linears_of, parts_of


def _model(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    model.add_module("mlp", kind())
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model.eval().requires_grad_(False).to(dtype)


def _replaced(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy whose block is replaced, with the same weights."""
    made = copy.deepcopy(model)
    assert use_expert_blocks(made, dtype, {}) == ()
    for name, experts in parts_of(made).items():
        stack = made.get_parameter(name)
        for own, parts in zip(stack, experts, strict=True):
            values = [model.get_parameter(part) for part in parts]
            own.copy_(torch.cat(values) if len(values) > 1 else values[0])
    return made


def _results(model: Any, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    out = model.mlp(torch.randn(1, tokens, WIDTH, generator=generator).to(dtype))
    return pytree.tree_leaves(out)


@pytest.mark.parametrize("block", own_experts.BLOCKS)
def test_loops_are_done_for_all_tokens(block: str) -> None:
    _check(block, torch.float32)


@pytest.mark.parametrize("block", tiered(own_experts.BLOCKS, "WhereEach", "SortedCounts"))
def test_they_are_in_16_bits(block: str) -> None:
    _check(block, torch.bfloat16)


def _check(block: str, dtype: torch.dtype) -> None:
    model = _model(own_experts.BLOCKS[block], dtype)
    made = _replaced(model, dtype)
    assert "forward" in vars(made.mlp)
    limit = 1e-5 if dtype == torch.float32 else 2**-6
    for tokens in (1, 3, 30):
        results = zip(*(_results(m, tokens, dtype) for m in (model, made)), strict=True)
        for wanted, found in results:
            most = limit * float(wanted.abs().max())
            torch.testing.assert_close(found, wanted, rtol=0, atol=most)


@pytest.mark.parametrize("block", tiered(own_experts.BLOCKS, "WhereHit", "SortedEnds", "Slices"))
def test_many_experts_get_no_token(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_experts, "EXPERTS", 42)
    model = _model(own_experts.BLOCKS[block])
    made = _replaced(model)
    assert "forward" in vars(made.mlp)
    for wanted, found in zip(*(_results(m, 9, torch.float32) for m in (model, made)), strict=True):
        most = 1e-5 * float(wanted.abs().max())
        torch.testing.assert_close(found, wanted, rtol=0, atol=most)


def test_linears_with_one_input_are_joined() -> None:
    made = _replaced(_model(own_experts.WhereEach))
    assert linears_of(made) == {
        "mlp.experts.gate_proj_up_proj": (
            "mlp.experts.{}.gate_proj",
            "mlp.experts.{}.up_proj",
        ),
        "mlp.experts.down_proj": ("mlp.experts.{}.down_proj",),
    }
    assert made.get_parameter("mlp.experts.gate_proj_up_proj").shape == (EXPERTS, 2 * INNER, WIDTH)


def test_equal_blocks_share_one_function() -> None:
    model = nn.ModuleDict({"a": own_experts.WhereHit(), "b": own_experts.WhereHit()}).eval()
    assert use_expert_blocks(model, torch.float32, {}) == ()
    first, second = (block.forward for block in model.values())
    assert first.__func__ is second.__func__  # type: ignore[union-attr]


def test_calls_with_other_arguments_are_refused() -> None:
    made, x = _replaced(_model(own_experts.MaskedRows)), torch.randn(1, 3, WIDTH)
    assert made.mlp(x=x).shape == x.shape
    with pytest.raises(CompileError, match="gets more than the states of tokens"):
        made.mlp(x, x)


class Marked(own_experts.SortedEnds):
    """Also takes where images are, of which a text has none."""

    def forward(self, hidden_states: Tensor, starts: Any, ends: Any, scale: float = 1.0) -> Tensor:
        if starts is not None:
            hidden_states = hidden_states[:, starts:ends]
        return super().forward(hidden_states * scale)


def test_arguments_that_are_none() -> None:
    model, x = _model(Marked), torch.randn(1, 3, WIDTH)
    made = _replaced(model)
    torch.testing.assert_close(made.mlp(x, None, ends=None), model.mlp(x, None, None))
    for others in ((0, 2), (None, None, 2.0)):
        with pytest.raises(CompileError, match="gets more than the states of tokens"):
            made.mlp(x, *others)


def test_attributes_that_the_code_sets() -> None:
    model = _model(own_experts.Losses)
    buffers: dict[str, Tensor] = {}
    use_expert_blocks(model, torch.float32, buffers)
    assert model.mlp.loss == 0.0
    assert model.mlp.balance.is_meta and buffers["mlp.balance"].isnan(), "not known"
    assert not hasattr(model.mlp, "scores"), "its value depends on the tokens"


def test_linears_in_a_row() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = _model(type("Other", (own_experts.MaskedRows,), {"kind": LowRank}))
    made = _replaced(model)
    wanted, found = (_results(m, 9, torch.float32) for m in (model, made))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_values_of_buffers_are_used() -> None:
    """A table that only the config gives, and that code indexes with."""

    class Hashed(Block):
        def __init__(self) -> None:
            super().__init__()
            order = torch.arange(EXPERTS - 1, -1, -1, device="meta")
            self.register_buffer("order", order, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.view(-1, x.shape[-1])
            weights, selected = self.gate(flat).topk(TOP_K)
            selected, out = self.order[selected], torch.zeros_like(flat)
            for i, expert in enumerate(self.experts):
                rows, k = torch.where(selected == i)
                out[rows] += weights[rows, k, None] * expert(flat[rows])
            return out.view_as(x)

    values = {"mlp.order": torch.arange(EXPERTS - 1, -1, -1)}
    assert use_expert_blocks(_model(Hashed), torch.float32, values) == ()
    [reason] = use_expert_blocks(_model(Hashed), torch.float32, {})
    assert "Hashed computes its experts in a loop that is not understood" in reason


class Loop(Block):
    """A loop with a flaw, by name."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, selected = self.gate(flat).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, k = torch.where(selected == i)
            if self.flaw == "capacity":
                rows, k = rows[:2], k[:2]
            added = expert(flat[rows]) * weights[rows, k, None]
            if self.flaw == "largest":
                out[rows] = torch.maximum(out[rows], added)
            elif self.flaw == "number":
                out[rows] += added * (i + 1)
            else:
                out[rows] += added
        if self.flaw == "many" and flat.shape[0] > 100:
            out = out * 2
        if self.flaw == "few" and flat.shape[0] == 1:
            out = out + 1
        if self.flaw == "value":
            out = out * (2 if float(weights.max()) > 0.5 else float(weights.max()))
        if self.flaw == "twice":
            out = out + self.experts[0](flat)
        return out.view_as(x)


@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        ("capacity", "do not get rows of tokens by numbers"),
        ("largest", "not the weighted results"),
        ("number", "not the weighted results"),
        ("many", "its results differ for 129 tokens"),
        ("few", "its results differ for 1 tokens"),
        ("value", "may branch on other values"),
        ("twice", "do not get rows of tokens by numbers|not the weighted results"),
    ],
)
def test_other_loops_are_left_with_a_reason(flaw: str, reason: str) -> None:
    model = _model(lambda: Loop(flaw))
    own_forward = model.mlp.forward.__func__
    [found] = use_expert_blocks(model, torch.float32, {})
    assert found.startswith("Loop computes its experts in a loop that is not understood: ")
    assert re.search(reason, found), found
    assert model.mlp.forward.__func__ is own_forward
    assert not any(isinstance(m, StackedExperts) for m in model.modules())


class Mixing(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Counting(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Branching(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Mixing, "do not compute each row by itself"),
        (Counting, "have buffers"),
        (Branching, "can't be traced"),
    ],
)
def test_experts_that_are_not_functions_of_a_row(kind: type[nn.Module], reason: str) -> None:
    block = type("Other", (own_experts.MaskedRows,), {"kind": kind})
    [found] = use_expert_blocks(_model(block), torch.float32, {})
    assert reason in found


def test_experts_whose_code_differs() -> None:
    class Scaled(Gated):
        count = 0

        def __init__(self) -> None:
            super().__init__()
            self.factor = float(Scaled.count)
            Scaled.count += 1

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    block = type("Other", (own_experts.MaskedRows,), {"kind": Scaled})
    [found] = use_expert_blocks(_model(block), torch.float32, {})
    assert "its experts differ" in found


class FlawedSlices(own_experts.Slices):
    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, selected = self.gate(flat).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(flat)
        for i in range(EXPERTS):
            rows, k = torch.where(selected == i)
            w1 = self.w1[i] * 2 if self.flaw == "scaled" else self.w1[i]
            b1 = self.b1[0] if self.flaw == "other" else self.b1[i]
            inner = F.linear(flat[rows], w1, b1)
            if self.flaw == "mixing":
                inner = inner - inner.mean(0)
            if self.flaw == "one":
                inner = inner + i
            own = F.linear(inner, self.w2[i])
            if self.flaw == "after":
                own = F.relu(own)
            out.index_add_(0, rows, own * weights[rows, k, None])
        return out.view_as(x)


@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        ("scaled", "use w1 other than in a linear"),
        ("other", "uses a slice of another"),
        ("mixing", "not the weighted results|its results differ"),
        ("one", "differ in their code"),
        ("after", "not the weighted results"),
    ],
)
def test_other_slices_are_left_with_a_reason(flaw: str, reason: str) -> None:
    model = _model(lambda: FlawedSlices(flaw))
    [found] = use_expert_blocks(model, torch.float32, {})
    assert re.search(reason, found), found
    assert "forward" not in vars(model.mlp)


def test_other_lists_of_modules_are_left() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for head in self.heads:
                x = F.relu(head(x))
            return x

    model = _model(Heads)
    use_expert_blocks(model, torch.float32, {})
    assert isinstance(model.mlp.heads, nn.ModuleList)
