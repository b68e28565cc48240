"""find_positions: a model's own numbers of its tokens are their positions; others are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Values, apply, assert_idempotent, assert_same, ops, run, step, trace, weight
from torch import Tensor

from llmc.errors import CompileError
from llmc.passes.find_positions import find_positions

TOKENS, CHANNELS, POSITIONS = 9, 6, 64
INPUTS = {
    "token_ids": step(torch.randint(0, 20, (TOKENS,))),
    "positions": step(torch.arange(TOKENS)),
    "embed": weight("embed", torch.randn(20, CHANNELS)),
    "learned": weight("learned", torch.randn(POSITIONS, CHANNELS)),
}
# Two requests in one step: the end of one, and another's beginning.
PACKED = torch.tensor([40, 41, 42, 0, 1, 2, 3, 4, 5])

# Embedded tokens [1, T, C] and learned positions [P, C] -> [1, T, C].
Tail = Callable[[Tensor, Tensor], Tensor]


def model(tail: Tail) -> torch.fx.GraphModule:
    def forward(token_ids: Tensor, positions: Tensor, embed: Tensor, learned: Tensor) -> Tensor:
        x = F.embedding(token_ids.unsqueeze(0), embed)
        return tail(x, learned) + positions.unsqueeze(0).unsqueeze(-1)

    return trace(forward, **INPUTS)


def steps(place: Tensor) -> Tensor:
    """Grows every four tokens."""
    return torch.log1p(torch.floor((place.float() + 1) / 4))


def scaled(x: Tensor, _: Tensor) -> Tensor:
    place = torch.arange(x.shape[1]) + 0
    return x * steps(place).view(1, x.shape[1], 1).expand(1, x.shape[1], 1)


def learned_rows(x: Tensor, learned: Tensor) -> Tensor:
    return x + F.embedding(torch.arange(2, x.shape[1] + 2).unsqueeze(0), learned)


def counted_ones(x: Tensor, learned: Tensor) -> Tensor:
    place = torch.ones_like(x[:, :, 0], dtype=torch.int64).cumsum(-1) - 1
    return x + learned[place]


def first_rows(x: Tensor, learned: Tensor) -> Tensor:
    return x + learned[: x.shape[1]].unsqueeze(0).double().float()


def rotary(x: Tensor, learned: Tensor) -> Tensor:
    """As in many rotary embeddings: frequencies [1, C, 1] @ positions [1, 1, T]."""
    place = torch.arange(x.shape[1])[None, None, :].float()
    return x + (learned[0][None, :, None] @ place).transpose(1, 2)


def outer(x: Tensor, learned: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1])[:, None].float() @ learned[:1]


def masked(x: Tensor, _: Tensor) -> Tensor:
    """What is alike for all tokens is none of them."""
    first = torch.arange(x.shape[1], dtype=torch.int32)[None, :, None] < 3
    return torch.where(first, x, x * torch.full((1, x.shape[1], 1), 2.0))


WANTED: dict[Tail, Callable[[Tensor], Tensor]] = {
    scaled: lambda x: x * steps(PACKED)[:, None],
    learned_rows: lambda x: x + INPUTS["learned"].tensor[PACKED + 2],
    first_rows: lambda x: x + INPUTS["learned"].tensor[PACKED],
    rotary: lambda x: x + PACKED[:, None] * INPUTS["learned"].tensor[0],
    outer: lambda x: x + PACKED[:, None] * INPUTS["learned"].tensor[0],
    counted_ones: lambda x: x + INPUTS["learned"].tensor[PACKED],
    masked: lambda x: torch.where(PACKED[:, None] < 3, x, 2 * x),
}


@pytest.mark.parametrize("tail", WANTED)
def test_counts_become_positions(tail: Tail) -> None:
    gm = model(tail)
    found, (report,) = apply(gm, find_positions(max_positions=POSITIONS))
    assert not any(name.startswith(("aten.arange", "aten.cumsum")) for name in ops(found))
    assert report.notes and all(n.endswith("of a token") for n in report.notes)
    assert_same(found, gm, Values.of(**INPUTS), tolerance=0)
    assert_idempotent(gm, find_positions(max_positions=POSITIONS))
    inputs = INPUTS | {"positions": step(PACKED)}
    x = INPUTS["embed"].tensor[INPUTS["token_ids"].tensor]
    want = WANTED[tail](x) + PACKED[:, None]
    torch.testing.assert_close(run(found, Values.of(**inputs))[0], want)


def test_the_positions_are_added_where_the_model_reads_none() -> None:
    def forward(token_ids: Tensor, embed: Tensor) -> Tensor:
        return scaled(F.embedding(token_ids.unsqueeze(0), embed), embed)

    gm = trace(forward, **{k: INPUTS[k] for k in ("token_ids", "embed")})
    found, _ = apply(gm, find_positions(max_positions=POSITIONS))
    assert_same(found, gm, Values.of(**INPUTS), tolerance=0)


def test_a_table_with_leading_sizes_of_one_is_whole_where_positions_are_looked_up() -> None:
    """As in many rotary embeddings of 2023."""

    def forward(token_ids: Tensor, positions: Tensor, embed: Tensor, table: Tensor) -> Tensor:
        x = F.embedding(token_ids.unsqueeze(0), embed)
        rows = table[:, :, : x.shape[1]].double().squeeze(1).squeeze(0)
        return x * rows[positions.unsqueeze(0)]

    inputs = {name: INPUTS[name] for name in ("token_ids", "positions", "embed")}
    inputs["table"] = weight("table", torch.randn(1, 1, POSITIONS, CHANNELS))
    gm = trace(forward, **inputs)
    found, _ = apply(gm, find_positions(max_positions=POSITIONS))
    assert "aten.slice.Tensor" not in ops(found)
    assert_same(found, gm, Values.of(**inputs), tolerance=0)
    x = inputs["embed"].tensor[inputs["token_ids"].tensor]
    got = run(found, Values.of(**inputs | {"positions": step(PACKED)}))[0]
    torch.testing.assert_close(got, x * inputs["table"].tensor[0, 0, PACKED].double())


def test_a_table_is_whole_where_positions_are_looked_up() -> None:
    """Tables of cosines, say, that a model cuts to the length of its text."""

    def forward(token_ids: Tensor, positions: Tensor, embed: Tensor, learned: Tensor) -> Tensor:
        x = F.embedding(token_ids.unsqueeze(0), embed)
        return x * learned[: x.shape[1]].to(torch.float64)[positions.unsqueeze(0)]

    gm = trace(forward, **INPUTS)
    found, _ = apply(gm, find_positions(max_positions=POSITIONS))
    assert "aten.slice.Tensor" not in ops(found)
    assert_same(found, gm, Values.of(**INPUTS), tolerance=0)
    x = INPUTS["embed"].tensor[INPUTS["token_ids"].tensor]
    got = run(found, Values.of(**INPUTS | {"positions": step(PACKED)}))[0]
    torch.testing.assert_close(got, x * INPUTS["learned"].tensor[PACKED].double())


def from_the_end(x: Tensor, learned: Tensor) -> Tensor:
    return x + learned[x.shape[1] - 1 - torch.arange(x.shape[1])]


def share_of_the_text(x: Tensor, _: Tensor) -> Tensor:
    return x * (torch.arange(x.shape[1]) / x.shape[1])[:, None]


def number_of_tokens(x: Tensor, _: Tensor) -> Tensor:
    return x * torch.log(torch.full((1,), x.shape[1], dtype=torch.float32))


def summed(x: Tensor, _: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1]).float().cumsum(0)[:, None]


def last_rows(x: Tensor, learned: Tensor) -> Tensor:
    return x + learned[POSITIONS - x.shape[1] :]


def weighted(x: Tensor, _: Tensor) -> Tensor:
    place = torch.arange(x.shape[1]).float()
    return x + (place @ (x[0] @ x[0].T))[None, :, None]


def columns(x: Tensor, learned: Tensor) -> Tensor:
    return x @ (x.transpose(1, 2) @ learned[: x.shape[1]])


def longer(x: Tensor, _: Tensor) -> Tensor:
    place = torch.arange(x.shape[1]).float()[None, :, None].expand(1, x.shape[1], CHANNELS)
    return torch.cat((place, x), 1)[:, x.shape[1] :]


def addresses(x: Tensor, _: Tensor) -> Tensor:
    return x[:, torch.arange(x.shape[1])]


def pairs(x: Tensor, _: Tensor) -> Tensor:
    place = torch.arange(x.shape[1])
    return torch.where(place[:, None] <= place[None, :], x @ x.transpose(1, 2), 0.0) @ x


def sorted_rows(x: Tensor, _: Tensor) -> Tensor:
    bounds = x[0, :, 0].cumsum(0)
    return x + torch.searchsorted(bounds, torch.arange(x.shape[1]).float())[:, None]


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        (from_the_end, "number of tokens"),
        (share_of_the_text, "number of tokens"),
        (number_of_tokens, "number of tokens"),
        (last_rows, "number of tokens"),
        (columns, "may mix rows"),
        (weighted, "aten.matmul.default, which may mix rows"),
        (longer, "may mix rows"),
        (summed, "depends only on its position"),
        (addresses, "may mix rows"),
        (pairs, "may mix rows"),
        (sorted_rows, "may mix rows"),
    ],
)
def test_what_depends_on_the_place_in_the_step_is_refused(tail: Tail, why: str) -> None:
    with pytest.raises(CompileError, match=why):
        apply(model(tail), find_positions(max_positions=POSITIONS))


def test_other_rows_than_tokens_are_left_alone() -> None:
    """The number of a row among all pairs of tokens and experts, say."""

    def two_each(x: Tensor, _: Tensor) -> Tensor:
        rows = x.repeat_interleave(2, dim=1)
        bounds = torch.searchsorted(rows[0, :, 0].cumsum(0), torch.arange(rows.shape[1]).float())
        return (rows * bounds[:, None]).view(1, -1, 2, CHANNELS).sum(2)

    gm = model(two_each)
    found, (report,) = apply(gm, find_positions(max_positions=POSITIONS))
    assert ops(found) == ops(gm)
    (note,) = report.notes
    assert "left unchanged: it has 2*" in note
