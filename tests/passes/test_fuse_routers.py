"""fuse_routers: softmax and top-k of a router in one op, the weighted sum of experts in another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_graphs import Arg, Values, apply, assert_idempotent, assert_same, ops, step, trace, weight
from torch import Tensor
from torch.nn import functional

from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.rms_norm import add_rms_norm
from llmc.passes.fuse_routers import fuse_routers

GEN = torch.Generator().manual_seed(0)
TOKENS, WIDTH, EXPERTS = 5, 16, 8


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GEN)


INPUTS: dict[str, Arg] = {
    "x": step(rand(TOKENS, WIDTH)),
    "slot_mapping": step(torch.tensor([3, -1, 0, 7, -1])),
    "router": weight("router", rand(EXPERTS, WIDTH)),
    "experts": weight("experts", rand(EXPERTS, WIDTH, WIDTH)),
    "correction": weight("correction", torch.linspace(-0.4, 0.3, EXPERTS)),
}
VALUES = Values.of(**INPUTS)
Route = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def routed(route: Route) -> Callable[..., Tensor]:
    def layer(
        x: Tensor, slot_mapping: Tensor, router: Tensor, experts: Tensor, correction: Tensor
    ) -> Tensor:
        share, index = route(x @ router.T, correction)
        rows = x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, WIDTH)
        y = expert_linear.overload(rows, experts, None, index.reshape(-1), False)
        return (y.reshape(-1, 2, WIDTH) * share.unsqueeze(-1)).sum(1)

    return layer


def known(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without the results of padding tokens."""

    def masked(
        x: Tensor, slot_mapping: Tensor, router: Tensor, experts: Tensor, correction: Tensor
    ) -> Tensor:
        return layer(x, slot_mapping, router, experts, correction) * (slot_mapping >= 0).unsqueeze(
            -1
        )

    return masked


def plain(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    share, index = logits.softmax(-1).topk(2)
    return share, index


def normalized(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    share, index = logits.softmax(-1, dtype=torch.float32).topk(2, dim=-1)
    return share / share.sum(-1, keepdim=True), index


def in_place(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    share, index = logits.softmax(-1).topk(2)
    share /= share.sum(dim=-1, keepdim=True)
    return share.to(torch.float64), index


def highest_first(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    highest, index = logits.topk(2)
    return highest.softmax(1), index


def highest_widened(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    highest, index = logits.to(torch.float64).topk(2)
    return highest.softmax(1).float(), index


def sigmoid_of_the_highest(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    highest, index = logits.topk(2)
    return highest.sigmoid() * 1.5, index


def highest_sigmoids(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    share, index = logits.to(torch.float64).sigmoid().topk(2)
    return (share / (share.sum(-1, keepdim=True) + 0.1)).float(), index


def roots(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    scores = functional.softplus(logits).sqrt()
    index = (scores + correction).topk(2).indices
    return scores.gather(1, index) * 1.5, index


def corrected(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    index = (correction.unsqueeze(0) + scores).topk(2).indices
    return scores.gather(1, index), index


def of_groups(groups: int, count: int, fill: float, turned: bool = False) -> Route:
    def route(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        ranked = scores + correction
        best = ranked.view(-1, groups, EXPERTS // groups).topk(2).values.sum(-1)
        marks = torch.zeros_like(best).scatter(1, best.topk(count).indices, 1)
        sizes = (-1, groups, EXPERTS // groups)
        spread = marks.unsqueeze(-1).expand(*sizes)
        if turned:
            spread = marks.unsqueeze(1).expand(-1, EXPERTS // groups, groups)
        allowed = spread.reshape(-1, EXPERTS)
        index = ranked.masked_fill(~allowed.bool(), fill).topk(2, sorted=False).indices
        share = scores.gather(1, index)
        share /= share.sum(-1, keepdim=True) + 1e-3
        return share * 2.5, index

    return route


INF = float("inf")


@pytest.mark.parametrize(
    "route",
    [
        plain,
        normalized,
        in_place,
        highest_first,
        highest_widened,
        sigmoid_of_the_highest,
        highest_sigmoids,
        corrected,
        roots,
        of_groups(4, 2, -INF),
        of_groups(2, 2, 0.0),  # all of them
        of_groups(1, 1, -INF),
    ],
)
def test_a_router_and_its_sum_become_two_ops(route: Route) -> None:
    gm = trace(known(routed(route)), **INPUTS)
    fused, (report,) = apply(gm, fuse_routers())
    made = ops(fused)
    assert made["llmc.choose_experts.default"] == made["llmc.sum_experts.default"] == 1
    gone = {"aten.topk.default", "aten.softmax.int", "aten.div.Tensor", "aten.div_.Tensor"}
    gone |= {"aten.sigmoid.default", "aten.gather.default", "aten.masked_fill.Scalar"}
    gone |= {"aten.to.dtype"} if route is highest_widened else set()
    assert not gone & made.keys() and not report.notes
    assert_same(fused, gm, VALUES)
    assert_idempotent(gm, fuse_routers())


def test_the_residual_sum_joins_the_sum_of_experts() -> None:
    def block(
        x: Tensor, slot_mapping: Tensor, router: Tensor, experts: Tensor, correction: Tensor
    ) -> list[Tensor]:
        y = routed(plain)(x, slot_mapping, router, experts, correction).reshape(1, -1, WIDTH)
        return list(add_rms_norm.overload(y, x.unsqueeze(0), None, 1e-6, 0.0))

    inputs = {**INPUTS, "slot_mapping": step(torch.arange(TOKENS))}
    gm = trace(block, **inputs)
    fused, _ = apply(gm, fuse_routers())
    assert_same(fused, gm, Values.of(**inputs))
    made = ops(fused)
    assert made["llmc.sum_experts.default"] == made["llmc.rms_norm.default"] == 1
    assert "llmc.add_rms_norm.default" not in made


def test_the_residual_sum_joins_it_also_past_a_shared_expert() -> None:
    def block(
        x: Tensor, slot_mapping: Tensor, router: Tensor, experts: Tensor, correction: Tensor
    ) -> list[Tensor]:
        y = routed(plain)(x, slot_mapping, router, experts, correction).reshape(1, -1, WIDTH)
        y = y + functional.linear(x, experts[0]).unsqueeze(0)
        return list(add_rms_norm.overload(x.unsqueeze(0), y, None, 1e-6, 0.0))

    inputs = {**INPUTS, "slot_mapping": step(torch.arange(TOKENS))}
    gm = trace(block, **inputs)
    fused, _ = apply(gm, fuse_routers())
    assert_same(fused, gm, Values.of(**inputs))
    made = ops(fused)
    assert made["llmc.rms_norm.default"] == 1 and "llmc.add_rms_norm.default" not in made
    [total] = [n for n in fused.graph.nodes if "sum_experts" in str(n.target)]
    assert len(total.args) == 4  # with a residual
    plainly, _ = apply(gm, fuse_routers(absorbs_norms=False))
    assert_same(plainly, gm, Values.of(**inputs))
    made = ops(plainly)
    assert made["llmc.add_rms_norm.default"] == 1 and "aten.add.Tensor" not in made


def test_padding_chooses_no_expert() -> None:
    fused, _ = apply(trace(known(routed(normalized)), **INPUTS), fuse_routers())
    [chosen] = [n for n in fused.graph.nodes if "choose_experts" in str(n.target)]
    assert [str(a) for a in chosen.args[:2]][1] == "slot_mapping_1"


def test_other_routers_and_other_top_values_are_left_alone() -> None:
    def tanh(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        share, index = logits.tanh().topk(2)
        return share, index

    def by_token(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        index = (scores + logits.sin()).topk(2).indices
        return scores.gather(1, index), index

    def shown(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        share, index = logits.softmax(-1).topk(2)
        return share * index, index

    def of_other_groups(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        """The group of the highest logit alone; no top-k of groups."""
        scores = logits.sigmoid()
        marks = torch.zeros_like(scores[:, :4]).scatter(1, logits.argmax(-1, True) // 2, 1)
        allowed = marks.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, EXPERTS)
        index = scores.masked_fill(~allowed.bool(), -INF).topk(2).indices
        return scores.gather(1, index), index

    def of_groups_by_all(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        """Groups by their whole sum, of values in four dimensions."""
        scores = logits.sigmoid()
        best = scores.view(-1, 4, 1, 2).topk(2).values.sum(-1).squeeze(-1)
        marks = torch.zeros_like(best).scatter(1, best.topk(2).indices, 1)
        allowed = marks.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, EXPERTS)
        index = scores.masked_fill(~allowed.bool(), -INF).topk(2).indices
        return scores.gather(1, index), index

    note = "1 routers are in no form that choose_experts computes"
    for route, notes in (
        (tanh, (note,)),
        (by_token, (note,)),
        (of_groups(4, 2, 0.0), (note,)),  # a negative sum would lose to an expert of another group
        (of_groups(4, 2, -INF, turned=True), (note,)),  # groups of experts that are not neighbours
        (of_other_groups, (note,)),
        (of_groups_by_all, (note,)),
        (shown, ()),
    ):
        fused, (report,) = apply(trace(routed(route), **INPUTS), fuse_routers())
        assert "llmc.choose_experts.default" not in ops(fused) and report.notes == notes
