"""apply_lora: every linear over parameters gets its rows' adapters, merged ones part by part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import (
    Values,
    apply,
    assert_idempotent,
    assert_same,
    draw_adapter,
    roles,
    run,
    step,
    trace,
    weight,
)
from torch import Tensor

from llmc.kernels.expert_linear import expert_linear
from llmc.passes.apply_lora import apply_lora
from llmc.passes.inputs import AdapterInput
from llmc.passes.merge_linears import merge_linears

SLOTS, RANK = 3, 2


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


TOKENS = 5
X = step(rand(1, TOKENS, 8), dynamic=1)
WEIGHTS = weight("table.weight", rand(6, 8))
WA, WB = weight("a.weight", rand(6, 8)), weight("b.weight", rand(4, 8))
INPUTS = {"token_ids": step(torch.arange(TOKENS)), "x": X, "wa": WA, "wb": WB}
# two requests: tokens 0 and 1 have the adapter in slot 3, the others none
STEP = {
    "query_start": torch.tensor([0, 2, 5], dtype=torch.int32),
    "request_row": torch.tensor([1, 0]),
    "adapter": torch.tensor([0, 3, 2, 1], dtype=torch.int32),
}


def both(token_ids: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, a), F.linear(x, b) * token_ids[:, None]


def values() -> Values:
    given = Values.of(**INPUTS)
    return Values(step={**given.step, **STEP}, weights=given.weights)


def low_rank(role: AdapterInput, part: int, first: int, last: int, x: Tensor) -> Tensor:
    """The product with B A of slot 3, for the channels of one part."""
    b_role = AdapterInput(op="linear", matrix="b", weights=role.weights, widths=role.widths)
    a = draw_adapter(role, (SLOTS, len(role.widths), RANK, 8))[2, part]
    b = draw_adapter(b_role, (SLOTS, RANK, sum(role.widths)))[2, :, first:last]
    return x @ a.T @ b


def test_rows_get_their_requests_adapter() -> None:
    gm = trace(both, **INPUTS)
    rewritten, (report,) = apply(gm, apply_lora(slots=SLOTS, rank=RANK))
    assert report.added["llmc.add_lora.default"] == 2 and not report.notes
    found = [role for role in roles(rewritten, AdapterInput) if role.matrix == "a"]
    assert [role.weights for role in found] == [("a.weight",), ("b.weight",)]
    plain, got = run(gm, values()), run(rewritten, values())
    for i, (role, scale) in enumerate(zip(found, (1, torch.arange(2)[:, None]), strict=True)):
        want = plain[i].clone()
        want[0, :2] += low_rank(role, 0, 0, role.widths[0], X.tensor[0, :2]) * scale
        torch.testing.assert_close(got[i], want)
    assert_idempotent(gm, apply_lora(slots=SLOTS, rank=RANK))


def test_parts_of_a_merged_linear_have_their_own_columns() -> None:
    gm = trace(both, **INPUTS)
    merged, (_, report) = apply(gm, merge_linears(), apply_lora(slots=SLOTS, rank=RANK))
    assert report.added["llmc.add_lora.default"] == 1
    (role,) = (role for role in roles(merged, AdapterInput) if role.matrix == "a")
    assert (role.weights, role.widths) == (("a.weight", "b.weight"), (6, 4))
    plain, got = run(gm, values()), run(merged, values())
    want = plain[0].clone()
    want[0, :2] += low_rank(role, 0, 0, 6, X.tensor[0, :2])
    torch.testing.assert_close(got[0], want)
    want = plain[1].clone()
    want[0, :2] += low_rank(role, 1, 6, 10, X.tensor[0, :2]) * torch.arange(2)[:, None]
    torch.testing.assert_close(got[1], want)


def test_samples_have_the_adapters_of_their_rows() -> None:
    def head(token_ids: Tensor, x: Tensor, index: Tensor, row: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.index_select(1, index), w) + 0 * (row.sum() + token_ids.sum())

    inputs = {
        "token_ids": step(torch.arange(TOKENS)),
        "x": X,
        "logits_index": step(torch.tensor([1, 4]), dynamic=None),
        "row": step(torch.tensor([1, 0]), dynamic=None),
        "w": WA,
    }
    gm = trace(head, **inputs)
    rewritten, _ = apply(gm, apply_lora(slots=SLOTS, rank=RANK))
    given = Values.of(**inputs)
    filled = Values(step={**given.step, **STEP}, weights=given.weights)
    plain, got = run(gm, filled), run(rewritten, filled)
    (role,) = (role for role in roles(rewritten, AdapterInput) if role.matrix == "a")
    plain[0, :1] += low_rank(role, 0, 0, 6, X.tensor[0, 1:2])
    torch.testing.assert_close(got, plain)


def test_rows_of_an_embedding() -> None:
    def embed(token_ids: Tensor, x: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids[None], table) + x

    inputs = {"token_ids": step(torch.tensor([3, 0, 5, 3, 1])), "x": X, "w": WEIGHTS}
    gm = trace(embed, **inputs)
    rewritten, (report,) = apply(gm, apply_lora(slots=SLOTS, rank=RANK))
    assert report.added["llmc.add_lora.default"] == 1 and not report.notes
    given = Values.of(**inputs)
    filled = Values(step={**given.step, **STEP}, weights=given.weights)
    plain, got = run(gm, filled), run(rewritten, filled)
    role_a, role_b = sorted(roles(rewritten, AdapterInput), key=lambda role: role.matrix)
    a, b = draw_adapter(role_a, (SLOTS, 6, RANK)), draw_adapter(role_b, (SLOTS, RANK, 8))
    plain[0, :2] += a[2, [3, 0]] @ b[2]
    torch.testing.assert_close(got, plain)
    assert_idempotent(gm, apply_lora(slots=SLOTS, rank=RANK))


@pytest.mark.parametrize("transposed", [False, True])
def test_choices_of_experts_get_their_tokens_adapters(transposed: bool) -> None:
    experts = 8
    stack = rand(experts, 8, 6) if transposed else rand(experts, 6, 8)

    def routed(token_ids: Tensor, x: Tensor, w: Tensor) -> Tensor:
        chosen = x[0].topk(2).indices
        rows = x[0].unsqueeze(1).expand(-1, 2, -1).reshape(-1, 8)
        out = expert_linear.overload(rows, w, None, chosen.reshape(-1), transposed)
        return out.view(-1, 2, 6) * (token_ids + 1)[:, None, None]

    inputs = {
        "token_ids": INPUTS["token_ids"], "x": X, "w": weight("experts.up", stack),
    }  # fmt: skip
    gm = trace(routed, **inputs)
    _, (report,) = apply(gm, apply_lora(slots=SLOTS, rank=RANK))
    assert not report.changed
    assert report.notes == ("1 linears of routed experts: max_lora_expert_rank is 0",)
    rewritten, (report,) = apply(gm, apply_lora(slots=SLOTS, rank=RANK, expert_rank=3))
    assert report.added["llmc.add_lora.default"] == 1 and not report.notes
    given = Values.of(**inputs)
    filled = Values(step={**given.step, **STEP}, weights=given.weights)
    plain, got = run(gm, filled), run(rewritten, filled)
    role_a, role_b = sorted(roles(rewritten, AdapterInput), key=lambda role: role.matrix)
    assert (role_a.op, role_a.weights, role_a.widths) == ("experts", ("experts.up",), (6,))
    a = draw_adapter(role_a, (SLOTS, experts, 3, 8))[2]
    b = draw_adapter(role_b, (SLOTS, experts, 3, 6))[2]
    for token in range(2):
        for choice, expert in enumerate(X.tensor[0, token].topk(2).indices.tolist()):
            low = X.tensor[0, token] @ a[expert].T
            plain[token, choice] += (token + 1) * (low @ b[expert])
    torch.testing.assert_close(got, plain)
    assert_idempotent(gm, apply_lora(slots=SLOTS, rank=RANK, expert_rank=3))


def test_experts_over_sorted_rows_are_left_alone() -> None:
    def sorted_rows(token_ids: Tensor, x: Tensor, expert: Tensor, w: Tensor) -> Tensor:
        rows = x[0].index_select(0, expert.argsort())
        out: Tensor = expert_linear.overload(rows, w, None, expert.sort().values, False)
        return out * token_ids[:, None]

    inputs = {
        "token_ids": INPUTS["token_ids"], "x": X, "expert": step(torch.tensor([1, 0, 1, 1, 0])),
        "w": weight("experts.up", rand(2, 6, 8)),
    }  # fmt: skip
    _, (report,) = apply(trace(sorted_rows, **inputs), apply_lora(slots=1, rank=1, expert_rank=1))
    assert report.notes == (
        "1 linears of routed experts: their rows are not the tokens' choices in order",
    )


def test_off_by_default_and_what_is_left_alone() -> None:
    gm = trace(both, **INPUTS)
    same, (report,) = apply(gm, apply_lora())
    assert not report.changed and report.notes
    assert_same(same, gm, Values.of(**INPUTS))
    computed = trace(lambda token_ids, x, a, b: F.linear(x, a * 2) * token_ids[:, None], **INPUTS)
    _, (report,) = apply(computed, apply_lora(slots=SLOTS, rank=RANK))
    assert report.notes == ("1 linears: the weight is computed",)
    looked_up = trace(
        lambda token_ids, w: F.embedding(token_ids, w * 2), token_ids=INPUTS["token_ids"], w=WA
    )
    _, (report,) = apply(looked_up, apply_lora(slots=SLOTS, rank=RANK))
    assert report.notes == ("1 embeddings: the weight is computed",)
    assert "llmc.add_lora.default" not in report.added
