"""last_token_logits: only the rows that are sampled reach the output head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Values, apply, ops, run, step, trace, weight
from torch import Tensor

from llmc.errors import CompileError
from llmc.passes.last_token_logits import last_token_logits

GEN = torch.Generator().manual_seed(0)
INPUTS = {
    "token_ids": step(torch.randint(0, 12, (7,), generator=GEN)),
    "embed": weight("embed", torch.randn(12, 8, generator=GEN)),
    "head": weight("head", torch.randn(12, 8, generator=GEN)),
}
INDEX = torch.tensor([6, 2])


def hidden(ids: Tensor, embed: Tensor) -> Tensor:
    return F.embedding(ids.unsqueeze(0), embed)


def check(fn: object) -> dict[str, int]:
    """The rewritten graph gives the selected rows of the whole; its ops come back."""
    gm = trace(fn, **INPUTS)  # type: ignore[arg-type]
    selected, (report,) = apply(gm, last_token_logits())
    values = Values.of(**INPUTS, logits_index=step(INDEX))
    want = run(gm, values)[0, INDEX]
    torch.testing.assert_close(run(selected, values), want, rtol=1e-6, atol=1e-6)
    assert report.added["aten.index_select.default"] == 1
    assert not report.removed
    return ops(selected)


def test_selects_before_the_head() -> None:
    def model(ids: Tensor, embed: Tensor, head: Tensor) -> Tensor:
        return F.linear(hidden(ids, embed), head)

    check(model)
    gm, _ = apply(trace(model, **INPUTS), last_token_logits())
    linear = next(n for n in gm.graph.nodes if "linear" in str(n.target))
    assert "index_select" in str(linear.args[0])
    # the shape that later passes read: S rows, not T
    assert str(linear.meta["val"].shape[1]) == "2"


def test_selects_before_the_head_through_a_softcap() -> None:
    def model(ids: Tensor, embed: Tensor, head: Tensor) -> Tensor:
        logits = F.linear(hidden(ids, embed), head).float()
        return torch.tanh(logits / 5.0) * 5.0

    check(model)
    gm, _ = apply(trace(model, **INPUTS), last_token_logits())
    tanh = next(n for n in gm.graph.nodes if "tanh" in str(n.target))
    assert str(tanh.meta["val"].shape[1]) == "2"


def test_selects_before_the_head_where_logits_are_cut_off() -> None:
    def model(ids: Tensor, embed: Tensor, head: Tensor) -> Tensor:
        return F.linear(hidden(ids, embed), head)[..., :9] / 2

    check(model)
    gm, (report,) = apply(trace(model, **INPUTS), last_token_logits())
    assert not report.notes
    assert str(gm.graph.output_node().args[0].meta["val"].shape) == "torch.Size([2, 9])"  # type: ignore[union-attr]


def test_selects_from_the_logits_where_no_linear_ends_the_graph() -> None:
    def model(ids: Tensor, embed: Tensor, head: Tensor) -> Tensor:
        return F.linear(hidden(ids, embed), head).log_softmax(-1)

    check(model)
    _, (report,) = apply(trace(model, **INPUTS), last_token_logits())
    assert report.notes == ("no linear at the end: rows are selected from the logits",)


def test_selects_from_logits_that_are_written_in_place() -> None:
    """What is written has a row for each token."""

    def ban(ids: Tensor, embed: Tensor, head: Tensor) -> Tensor:
        x = hidden(ids, embed)
        logits = F.linear(x, head)
        logits[..., 9:] = torch.full_like(x[..., :3], float("-inf"))
        return logits

    def after_a_cap(ids: Tensor, embed: Tensor, head: Tensor) -> Tensor:
        x = hidden(ids, embed)
        logits = torch.tanh(F.linear(x, head))
        logits[:, :, 3] = x.sum(-1)
        return logits * 2

    for model in (ban, after_a_cap):
        check(model)


def test_logits_that_are_not_per_token_are_refused() -> None:
    def model(ids: Tensor, embed: Tensor, head: Tensor) -> Tensor:
        return F.linear(hidden(ids, embed)[0], head).log_softmax(-1)

    with pytest.raises(CompileError, match="not made per token"):
        apply(trace(model, **INPUTS), last_token_logits())


def test_adding_the_logits_of_two_tokens_is_not_taken_for_pointwise() -> None:
    """A second operand made from all tokens must not meet rows that were already selected."""

    def model(ids: Tensor, embed: Tensor, head: Tensor) -> Tensor:
        x = hidden(ids, embed)
        return F.linear(x, head) + x.sum(-1, keepdim=True)

    check(model)
