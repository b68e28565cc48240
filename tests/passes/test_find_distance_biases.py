"""find_distance_biases: what tokens have for each distance is handed to attention as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tiny_graphs import Arg, Values, apply, assert_idempotent, cache, ops, run, step, trace
from torch import Tensor

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.passes.find_distance_biases import find_distance_biases
from llmc.passes.page_attention import page_attention

TOKENS, HEADS, KV_HEADS, DIM, DISTANCES, BLOCK_SIZE, SCALE = 13, 4, 2, 6, 5, 4, 0.4
WIDTHS = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, HEADS * DISTANCES, HEADS]
INPUTS: Mapping[str, Arg] = {
    "token_ids": step(torch.arange(TOKENS)),
    "x": step(
        torch.randn(1, TOKENS, sum(WIDTHS), generator=torch.Generator().manual_seed(0)), dynamic=1
    ),
    "key_cache": cache(0, "key"),
    "value_cache": cache(0, "value"),
}
Look = Callable[[Tensor, Tensor], Tensor]  # numbers [1, H, T, E], distances [T, T] -> [1, H, T, T]


def projected(token_ids: Tensor, x: Tensor) -> list[Tensor]:
    """q, k, v [1, H, T, D], numbers [1, H, T, E] and sinks [T, H]."""
    *qkv, numbers, sinks = (x + 0.1 * token_ids[None, :, None]).split(WIDTHS, -1)
    heads = [t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in qkv]
    return [*heads, numbers.unflatten(-1, (HEADS, -1)).transpose(1, 2), sinks[0]]


def looked_up(numbers: Tensor, distance: Tensor) -> Tensor:
    """As models write it."""
    index = distance[None, None].clamp(0, DISTANCES - 1).expand(1, HEADS, -1, -1)
    far = (distance < 0) | (distance >= DISTANCES)
    return numbers.gather(-1, index).masked_fill(far[None, None], 0.0)


def scaled(numbers: Tensor, distance: Tensor) -> Tensor:
    factor = torch.log(distance[:, 0].float() + 3).view(1, 1, -1, 1)
    return (looked_up(numbers, distance).float() * factor).to(numbers.dtype)


def model(look: Look, window: int = 0) -> Any:
    def forward(token_ids: Tensor, x: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        q, k, v, numbers, sinks = projected(token_ids, x)
        place = torch.arange(x.shape[1])
        bias = look(numbers, place[:, None] - place[None, :])
        caches = (key_cache, value_cache)
        given = (SCALE, window, 0, 0.0, sinks, None, None, 1, True, None, None, bias)
        return attention.overload(q, k, v, *caches, *given)

    return trace(forward, **INPUTS)


def paged_values() -> Values:
    """One request of all tokens, in blocks that lie backwards; the caches start as NaN."""
    blocks = -(-TOKENS // BLOCK_SIZE)
    table = torch.arange(blocks).flip(0)
    at = torch.arange(TOKENS)
    return Values(
        step={
            **{name: arg.tensor for name, arg in INPUTS.items() if arg.role is None},
            "slot_mapping": table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE,
            "query_start": torch.tensor([0, TOKENS], dtype=torch.int32),
            "context_len": torch.tensor([TOKENS], dtype=torch.int32),
            "block_table": table[None].int(),
        },
        weights={},
        caches={
            (0, part): torch.full((blocks, KV_HEADS, BLOCK_SIZE, DIM), float("nan"))
            for part in ("key", "value")
        },
    )


def expected(look: Look, window: int) -> Tensor:
    """[1, T, H, D], with a score more that has no value."""
    q, k, v, numbers, sinks = projected(INPUTS["token_ids"].tensor, INPUTS["x"].tensor)
    place = torch.arange(TOKENS)
    distance = place[:, None] - place[None, :]
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * SCALE + look(numbers, distance)
    hidden = (distance < 0) | (distance >= (window or TOKENS))
    scores = torch.cat((scores.masked_fill(hidden, float("-inf")), sinks.T[None, ..., None]), -1)
    return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2)


@pytest.mark.parametrize("look", [looked_up, scaled])
@pytest.mark.parametrize("window", [0, 4])
def test_rewrites_and_gives_the_same_numbers(look: Look, window: int) -> None:
    found, (report, _) = apply(
        model(look, window), find_distance_biases(), page_attention(block_size=BLOCK_SIZE)
    )
    assert report.notes == (f"attention: a bias for {DISTANCES} distances",)
    assert not {"aten.gather.default", "aten.masked_fill.Scalar"} & ops(found).keys()
    got = run(found, paged_values())
    torch.testing.assert_close(got, expected(look, window), rtol=1e-5, atol=1e-5)


def test_a_window_within_the_distances_needs_none_hidden() -> None:
    def near(numbers: Tensor, distance: Tensor) -> Tensor:
        index = distance[None, None].clamp(0, DISTANCES - 1)
        return numbers.gather(-1, index.expand(1, HEADS, -1, -1))

    apply(model(near, window=DISTANCES), find_distance_biases())
    with pytest.raises(CompileError, match="keys beyond the last distance get a number too"):
        apply(model(near, window=DISTANCES + 1), find_distance_biases())


def test_changes_nothing_the_second_time() -> None:
    assert_idempotent(model(looked_up), find_distance_biases())


def forward_distances(numbers: Tensor, distance: Tensor) -> Tensor:
    return looked_up(numbers, distance + 1)


def squared(numbers: Tensor, distance: Tensor) -> Tensor:
    return looked_up(numbers, distance) ** 2


def of_keys(numbers: Tensor, distance: Tensor) -> Tensor:
    """Multiplied by a number for each key."""
    return looked_up(numbers, distance) * (distance[:1] + 20).view(1, 1, 1, -1)


def of_pairs(numbers: Tensor, distance: Tensor) -> Tensor:
    return numbers @ numbers.transpose(2, 3)


@pytest.mark.parametrize(
    ("look", "reason"),
    [
        (forward_distances, "other numbers are looked up"),
        (squared, "it is computed by aten.pow"),
        (of_keys, "it is computed by aten.mul"),
        (of_pairs, "it is computed by aten.matmul"),
    ],
)
def test_other_biases_are_refused(look: Look, reason: str) -> None:
    with pytest.raises(CompileError, match=f"its tokens do not look up by distance .*{reason}"):
        apply(model(look), find_distance_biases())
