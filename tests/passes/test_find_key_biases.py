"""find_key_biases: a number for each key becomes a channel of the keys, and chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tiny_graphs import Arg, Values, apply, assert_idempotent, cache, ops, roles, run, step, trace
from torch import Tensor

from llmc.compiler.branches import same_code
from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.passes.find_key_biases import find_key_biases
from llmc.passes.inputs import CacheInput
from llmc.passes.page_attention import page_attention

TOKENS, HEADS, KV_HEADS, DIM, KEPT, BLOCK_SIZE, SCALE = 13, 4, 2, 6, 5, 4, 0.4
LOWEST = torch.finfo(torch.float32).min
FIND = find_key_biases(max_positions=64, block_size=BLOCK_SIZE)
WIDTHS = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, KV_HEADS]
INPUTS: Mapping[str, Arg] = {
    "token_ids": step(torch.arange(TOKENS)),
    "x": step(
        torch.randn(1, TOKENS, sum(WIDTHS), generator=torch.Generator().manual_seed(0)), dynamic=1
    ),
    "key_cache": cache(0, "key"),
    "value_cache": cache(0, "value"),
}
Add = Callable[[Tensor, Tensor], Tensor]  # numbers [1, G, T], mask -> what is added [1, H, T, T]


def projected(token_ids: Tensor, x: Tensor) -> list[Tensor]:
    """q, k, v [1, H, T, D], and the numbers [1, Hkv, T]."""
    *qkv, numbers = (x + 0.1 * token_ids[None, :, None]).split(WIDTHS, -1)
    return [*(t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in qkv), numbers.transpose(1, 2)]


def added(numbers: Tensor, mask: Tensor) -> Tensor:
    """As models write it: hidden keys have the lowest number."""
    tokens = numbers.shape[-1]
    hidden = torch.where(mask, 0.0, LOWEST)
    bias = numbers[:, :, None, :].expand(-1, -1, tokens, -1).masked_fill(hidden != 0, LOWEST)
    if tokens > KEPT:
        kept = torch.zeros_like(bias).scatter(-1, bias.topk(KEPT, dim=-1).indices, 1.0)
        bias = bias.masked_fill(kept == 0, LOWEST)
    of_all = bias[:, :, None].expand(bias.shape[0], KV_HEADS, HEADS // KV_HEADS, tokens, tokens)
    return of_all.reshape(bias.shape[0], HEADS, tokens, tokens)


def of_all_heads(numbers: Tensor, mask: Tensor) -> Tensor:
    one = numbers[:, :1, None, :].expand(-1, HEADS, numbers.shape[-1], -1)
    return one + torch.where(mask, 0.0, LOWEST)


def model(add: Add = added, *, tokens: int = TOKENS, layers: int = 1) -> Any:
    def forward(token_ids: Tensor, x: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        mask = torch.empty(0, 1, 1, 1, dtype=torch.bool)  # what stands for it
        q, k, v, numbers = projected(token_ids, x)
        for _ in range(layers):
            bias = add(numbers, mask)
            caches = (key_cache, value_cache)
            given = (SCALE, 0, 0, 0.0, None, None, None, 1, True, bias)
            out = attention.overload(q, k, v, *caches, *given).transpose(1, 2)
            q, numbers = q + out, numbers + out[:, :KV_HEADS, :, 0]
        return out

    short = {n: step(INPUTS[n].tensor[:tokens]) for n in ("token_ids",)}
    x = step(INPUTS["x"].tensor[:, :tokens], dynamic=1)
    return trace(forward, **{**INPUTS, **short, "x": x})


def paged_values() -> Values:
    """One request of all tokens, in blocks that lie backwards; the caches start as NaN."""
    blocks = -(-TOKENS // BLOCK_SIZE)
    table = torch.arange(blocks).flip(0)
    at = torch.arange(TOKENS)
    sizes = {(0, "key"): (KV_HEADS, 8), (0, "value"): (KV_HEADS, DIM), (1, "key"): (1, KV_HEADS)}
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
            part: torch.full((blocks, heads, BLOCK_SIZE, dim), float("nan"))
            for part, (heads, dim) in sizes.items()
        },
    )


def expected(add: Add) -> Tensor:
    """[1, H, T, D], of the masks that models are given."""
    q, k, v, numbers = projected(INPUTS["token_ids"].tensor, INPUTS["x"].tensor)
    bias = add(numbers, torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None])
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    return (q @ k.transpose(2, 3) * SCALE + bias).softmax(-1) @ v


@pytest.mark.parametrize("add", [added, of_all_heads])
def test_rewrites_and_gives_the_same_numbers(add: Add) -> None:
    found, _ = apply(model(add), FIND, page_attention(block_size=BLOCK_SIZE))
    assert ops(found).get("llmc.choose_blocks.default", 0) == (add is added)
    assert not {"aten.topk.default", "aten.masked_fill.Scalar"} & ops(found).keys()
    got = run(found, paged_values())
    torch.testing.assert_close(got, expected(add), rtol=1e-5, atol=1e-5)


def test_every_layer_has_numbers_and_a_choice_of_its_own() -> None:
    found, (report,) = apply(model(layers=2), FIND)
    assert ops(found)["llmc.choose_blocks.default"] == len(report.notes) == 2
    assert {(r.layer, r.part) for r in roles(found, CacheInput)} == {
        (0, "key"),
        (0, "value"),
        (1, "key"),
        (2, "key"),
    }


def test_a_context_within_the_choice_needs_none_and_is_the_code_of_few_tokens() -> None:
    within = find_key_biases(max_positions=KEPT, block_size=BLOCK_SIZE)
    long, (report,) = apply(model(), within)
    assert "llmc.choose_blocks.default" not in ops(long)
    assert report.notes == ("attention: a number for each key",)
    short, _ = apply(model(tokens=3), within)
    assert same_code(short.graph, long.graph, 3)


def test_changes_nothing_the_second_time() -> None:
    assert_idempotent(model(), FIND)


def doubled(numbers: Tensor, mask: Tensor) -> Tensor:
    return 2 * of_all_heads(numbers, mask)


def of_pairs(numbers: Tensor, mask: Tensor) -> Tensor:
    return added(numbers, mask) + numbers[:, :1, :, None]


def of_lowest(numbers: Tensor, mask: Tensor) -> Tensor:
    bias = of_all_heads(numbers, mask)
    kept = torch.zeros_like(bias).scatter(-1, bias.topk(KEPT, largest=False).indices, 1.0)
    return bias.masked_fill(kept == 0, LOWEST)


def all_seeing(numbers: Tensor, mask: Tensor) -> Tensor:
    return of_all_heads(numbers, mask) * 0.0 + numbers[:, :1, None, :]


@pytest.mark.parametrize(
    ("add", "reason"),
    [
        (doubled, "random numbers give another result"),
        (of_pairs, "it is computed from 2 tensors"),
        (of_lowest, "random numbers give another result"),
        (all_seeing, "it is computed from 2 tensors"),
    ],
)
def test_refuses_what_adds_something_else(add: Add, reason: str) -> None:
    with pytest.raises(CompileError, match=reason):
        apply(model(add), FIND)
