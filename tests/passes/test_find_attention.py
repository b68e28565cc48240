"""find_attention: attention spelled out in products becomes the marker; its meaning is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_graphs import (
    Arg,
    Values,
    apply,
    assert_idempotent,
    constant,
    ops,
    roles,
    run,
    step,
    trace,
    weight,
)
from torch import Tensor

from llmc.errors import CompileError
from llmc.passes.find_attention import find_attention
from llmc.passes.inputs import CacheInput

FIND = find_attention(max_positions=64)
TOKENS, HEADS, DIM = 9, 4, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
INPUTS: dict[str, Arg] = {
    "positions": step(torch.arange(TOKENS)),
    "q": step(torch.randn(1, HEADS, TOKENS, DIM), dynamic=2),
    "k": step(torch.randn(1, HEADS, TOKENS, DIM), dynamic=2),
    "v": step(torch.randn(1, HEADS, TOKENS, DIM), dynamic=2),
    "slopes": constant(SLOPES),
    "bias": weight("bias", torch.randn(HEADS, 1, 1)),
}
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def spelled_out(score: Score) -> Any:
    def forward(
        positions: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, bias: Tensor
    ) -> Tensor:
        scores = score(torch.matmul(q, k.transpose(-1, -2)), positions, slopes, bias)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v)

    return trace(forward, **INPUTS)


def hidden(positions: Tensor, window: int = 0) -> Tensor:
    distance = positions[:, None] - positions[None, :]
    gone = distance < 0
    return (gone | (distance >= window)) if window else gone


def causal(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    return (s * 0.3).masked_fill(hidden(positions), torch.finfo(s.dtype).min)


def windowed(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    return s / 2.0 + torch.where(hidden(positions, 5), -1e9, 0.0)


def sloped(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    """The bias grows with the key's position alone: the same after the softmax."""
    alibi = slopes[:, None, None] * positions
    return s + alibi + torch.where(hidden(positions), float("-inf"), 0.0)


def capped(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    """A softcap so high that small scores do not show it."""
    return causal(50 * torch.tanh(s / 50), positions, slopes, bias)


def squashed(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    return causal(torch.tanh(s), positions, slopes, bias)


@pytest.mark.parametrize("num_shared", [1, HEADS])
def test_a_sum_of_two_products_is_one_of_longer_vectors(num_shared: int) -> None:
    """A part for each head, and one that all heads share."""

    def forward(
        positions: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, bias: Tensor
    ) -> Tensor:
        own, other = q.split((5, 3), -1), k[:, :num_shared, :, 5:]
        scores = own[1] @ other.transpose(-1, -2) + own[0] @ k[..., :5].transpose(-1, -2)
        return torch.softmax(causal(scores, positions, slopes, bias), -1) @ v

    gm = trace(forward, **INPUTS)
    found, _ = apply(gm, FIND)
    assert ops(found)["llmc.attention.default"] == 1 and "aten.matmul.default" not in ops(found)
    values = Values.of(**INPUTS)
    torch.testing.assert_close(run(found, values), run(gm, values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "score",
    [
        lambda a, b: torch.add(a, b, alpha=2),  # not the sum
        lambda a, b: a + b[:, :, :, :1],  # no product of every key
        lambda a, b: a * b,
    ],
)
def test_other_ways_to_combine_two_products_are_refused(
    score: Callable[[Tensor, Tensor], Tensor],
) -> None:
    def forward(
        positions: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, bias: Tensor
    ) -> Tensor:
        both = score(q @ k.transpose(-1, -2), k @ q.transpose(-1, -2))
        return torch.softmax(causal(both, positions, slopes, bias), -1) @ v

    with pytest.raises(CompileError, match="2 products|modified by something"):
        apply(trace(forward, **INPUTS), FIND)


@pytest.mark.parametrize(
    ("score", "scale", "softcap", "window", "has_slopes"),
    [
        (causal, 0.3, 0.0, 0, False),
        (windowed, 0.5, 0.0, 5, False),
        (sloped, 1.0, 0.0, 0, True),
        (capped, 0.3, 15.0, 0, False),
        (squashed, 0.3, 0.3, 0, False),
    ],
)
def test_rewrites_and_gives_the_same_numbers(
    score: Score, scale: float, softcap: float, window: int, has_slopes: bool
) -> None:
    gm = spelled_out(score)
    found, (report,) = apply(gm, FIND)
    assert ops(found)["llmc.attention.default"] == 1
    assert not any("softmax" in name for name in ops(found))
    (marker,) = [n for n in found.graph.nodes if "llmc.attention" in str(n.target)]
    assert marker.args[5] == pytest.approx(scale, rel=1e-4)
    assert (marker.args[6], marker.args[7]) == (window, 0)
    assert marker.args[8] == pytest.approx(softcap, rel=1e-4)
    assert (marker.args[10] is not None) is has_slopes
    assert {(r.layer, r.part) for r in roles(found, CacheInput)} == {(0, "key"), (0, "value")}
    values = Values.of(**INPUTS)
    torch.testing.assert_close(run(found, values), run(gm, values), rtol=1e-4, atol=1e-5)
    assert report.notes


def test_changes_nothing_the_second_time() -> None:
    assert_idempotent(spelled_out(causal), FIND)


@pytest.mark.parametrize(
    ("scores", "mixed"),
    [
        ("bqhd, bkhd -> bhqk", "bhqk, bkhd -> bqhd"),
        ("bkhd,bqhd->bhqk", "bkhd,bhqk->bqhd"),  # keys and values first
        ("...ihd,...jhd->...hij", "...hij,...jhd->...ihd"),
    ],
)
def test_sums_over_indices_are_products_too(scores: str, mixed: str) -> None:
    def forward(positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        factors = (k, q) if scores.startswith("bk") else (q, k)
        s = causal(torch.einsum(scores, *factors), positions, SLOPES, SLOPES)
        weights = torch.softmax(s, -1)
        factors = (v, weights) if mixed.startswith("bk") else (weights, v)
        return torch.einsum(mixed, *factors)

    inputs = {name: INPUTS[name] for name in ("positions", "q", "k", "v")}
    gm = trace(forward, **inputs)
    assert ops(gm)["aten.einsum.default"] == 2
    found, _ = apply(gm, FIND)
    assert ops(found)["llmc.attention.default"] == 1
    assert not any("softmax" in name or "einsum" in name for name in ops(found))
    values = Values.of(**inputs)
    torch.testing.assert_close(run(found, values), run(gm, values), rtol=1e-4, atol=1e-5)


QKV = ("positions", "q", "k", "v")


def attended(
    weigh: Callable[[Tensor, Tensor], Tensor], after: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """`weigh`: scores to weights. `after`: what follows, before the product with the values."""

    def forward(positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = causal(q @ k.mT, positions, SLOPES, SLOPES)
        return after(weigh(scores, positions), positions) @ v

    return trace(forward, **{name: INPUTS[name] for name in QKV})


def assert_found(gm: Any) -> None:
    found, _ = apply(gm, FIND)
    assert ops(found)["llmc.attention.default"] == 1
    assert not any("softmax" in name or "aten.exp." in name for name in ops(found))
    values = Values.of(**{name: INPUTS[name] for name in QKV})
    torch.testing.assert_close(run(found, values), run(gm, values), rtol=1e-4, atol=1e-5)


def softmax(s: Tensor, positions: Tensor) -> Tensor:
    return s.softmax(-1)


def quotient(s: Tensor, positions: Tensor) -> Tensor:
    power = (s - s.max(-1, keepdim=True).values).exp()
    return power / power.sum(-1, keepdim=True)


def unchanged(weights: Tensor, positions: Tensor) -> Tensor:
    return weights


def masked(weights: Tensor, positions: Tensor) -> Tensor:
    return weights.masked_fill(hidden(positions), 0.0)


def multiplied(weights: Tensor, positions: Tensor) -> Tensor:
    return torch.nan_to_num(weights * ~hidden(positions))


def chosen(weights: Tensor, positions: Tensor) -> Tensor:
    return torch.where(hidden(positions), 0.0, weights)


@pytest.mark.parametrize("after", [unchanged, masked, multiplied, chosen])
@pytest.mark.parametrize("weigh", [softmax, quotient])
def test_weights_may_be_spelled_out_and_hidden_again(weigh: Any, after: Any) -> None:
    assert_found(attended(weigh, after))


def test_groups_of_heads_may_have_a_dimension() -> None:
    def products(positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.unflatten(1, (2, 2)), k[:, :2, None], v[:, :2, None]
        weights = causal(q @ k.mT, positions, SLOPES, SLOPES).softmax(-1)
        return (weights @ v).flatten(1, 2)

    def sums(positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k[:, :2], v[:, :2]))
        scores = torch.einsum("btkgd,bskd->bkgts", q.unflatten(2, (2, 2)), k)
        weights = causal(scores, positions, SLOPES, SLOPES).softmax(-1)
        return torch.einsum("bkgts,bskd->btkgd", weights, v).flatten(2, 3)

    def other_order(positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.unflatten(1, (2, 2)), k[:, None, :2], v[:, None, :2]
        weights = causal(q @ k.mT, positions, SLOPES, SLOPES).softmax(-1)
        return (weights @ v).flatten(1, 2)

    for forward in (products, sums, other_order):
        assert_found(trace(forward, **{name: INPUTS[name] for name in QKV}))


def halved(weights: Tensor, positions: Tensor) -> Tensor:
    return weights * torch.where(positions > 50, 0.5, 1.0)


def doubled(weights: Tensor, positions: Tensor) -> Tensor:
    return weights.masked_fill(hidden(positions), 2.0)


@pytest.mark.parametrize("after", [halved, doubled])
def test_weights_that_change_behind_the_softmax_are_refused(after: Any) -> None:
    """Also those of positions beyond the shortest sequences that are tried."""
    with pytest.raises(
        CompileError, match=r"weights do not simply multiply .*\(they change behind"
    ):
        apply(attended(softmax, after), FIND)


def learned(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    return causal(s, positions, slopes, bias) + bias


def clamped(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    return causal(s.clamp(-50, 50), positions, slopes, bias)


def cubed(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    return causal(s + 1e-6 * s**3, positions, slopes, bias)


def bidirectional(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    return s + 0.0 * (positions[:, None] + positions)


def curved(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    return causal(s, positions, slopes, bias) + positions.float() ** 2


def in_place(s: Tensor, positions: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    s.mul_(0.3)
    return causal(s, positions, slopes, bias)


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (learned, "it reads bias"),
        (clamped, "the scores are not only scaled"),
        (cubed, "the scores are not only scaled"),
        (bidirectional, "neither causal, nor a window"),
        (curved, "the bias is not linear in the distance"),
        (in_place, "written to in place"),
    ],
)
def test_what_it_can_not_measure_is_refused(score: Score, reason: str) -> None:
    with pytest.raises(CompileError, match=reason):
        apply(spelled_out(score), FIND)


def test_a_softmax_over_channels_is_left_alone() -> None:
    gm = trace(lambda q: torch.softmax(q, -1), q=INPUTS["q"])
    same, (report,) = apply(gm, FIND)
    assert ops(same) == ops(gm) and not report.notes
