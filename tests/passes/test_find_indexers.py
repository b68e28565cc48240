"""find_indexers: an indexer becomes the op, whatever its scores look like; another is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from tiny_graphs import Arg, Values, apply, assert_idempotent, cache, ops, roles, run, step, trace
from torch import Tensor

from llmc.errors import CompileError
from llmc.kernels.attention import among, attend, attention
from llmc.passes.find_indexers import find_indexers
from llmc.passes.inputs import CacheInput
from llmc.passes.page_attention import page_attention

SPARSE_BLOCK, TOP_BLOCKS = 3, 2
TOKENS, HEADS, DIM, INDEX_HEADS, INDEX_DIM, TOP_K, BLOCK_SIZE = 13, 2, 8, 3, 4, 5, 4
FIND = find_indexers(max_positions=64, block_size=BLOCK_SIZE)
WIDTHS = [HEADS * DIM] * 3 + [INDEX_HEADS * INDEX_DIM, INDEX_DIM, INDEX_HEADS]
INPUTS: Mapping[str, Arg] = {
    "token_ids": step(torch.arange(TOKENS)),
    "x": step(
        torch.randn(1, TOKENS, sum(WIDTHS), generator=torch.Generator().manual_seed(0)), dynamic=1
    ),
    "key_cache": cache(0, "key"),
    "value_cache": cache(0, "value"),
}
Choose = Callable[[Tensor, Tensor, Tensor], Tensor]


def projected(token_ids: Tensor, x: Tensor) -> list[Tensor]:
    """q, k, v [1, H, T, D]; of the indexer q [1, T, H, D], k [1, T, D] and weights [1, T, H]."""
    *qkv, iq, ik, iw = (x + 0.1 * token_ids[None, :, None]).split(WIDTHS, -1)
    attended = [t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in qkv]
    return [*attended, iq.unflatten(-1, (INDEX_HEADS, INDEX_DIM)), ik, iw]


def marker(window: int = 0) -> Tensor:
    """What stands for a mask while a model is captured."""
    return torch.empty(0, window + 1, 1, 1, dtype=torch.bool)


def weighted(iq: Tensor, ik: Tensor, iw: Tensor, mask: Tensor) -> Tensor:
    """Tokens first: all heads of a token side by side."""
    products = torch.relu(torch.matmul(iq.float(), ik.transpose(-1, -2).unsqueeze(1)) * 0.5)
    scores = torch.matmul(iw.unsqueeze(-2), products).squeeze(-2)
    return scores.masked_fill(~mask[:, 0], float("-inf"))


def heads_first(iq: Tensor, ik: Tensor, iw: Tensor, mask: Tensor) -> Tensor:
    """Summed, not multiplied, over the heads; hidden by addition."""
    products = torch.matmul(iq.transpose(1, 2), ik.transpose(-1, -2).unsqueeze(1))
    scores = (products.relu() * iw.transpose(1, 2).unsqueeze(-1)).sum(1) * 3.0
    return scores + torch.where(mask[:, 0], 0.0, -1e9)


def squared(iq: Tensor, ik: Tensor, iw: Tensor, mask: Tensor) -> Tensor:
    return weighted(iq, ik, iw, mask).square().masked_fill(~mask[:, 0], float("-inf"))


def negated(iq: Tensor, ik: Tensor, iw: Tensor, mask: Tensor) -> Tensor:
    return (-weighted(iq, ik, iw, mask)).masked_fill(~mask[:, 0], float("-inf"))


def all_seeing(iq: Tensor, ik: Tensor, iw: Tensor, mask: Tensor) -> Tensor:
    return weighted(iq, ik, iw, mask.new_ones(()).expand(1, 1, 1, 1)) + mask[:, 0].float()


def best(score: Callable[..., Tensor], window: int = 0) -> Choose:
    def choose(iq: Tensor, ik: Tensor, iw: Tensor) -> Tensor:
        scores = score(iq, ik, iw, marker(window))
        return scores.topk(torch.sym_min(TOP_K, iq.shape[1]), dim=-1).indices.to(torch.int32)

    return choose


def shifted(iq: Tensor, ik: Tensor, iw: Tensor) -> Tensor:
    return best(weighted)(iq, ik, iw) + 1


def lowest(iq: Tensor, ik: Tensor, iw: Tensor) -> Tensor:
    return weighted(iq, ik, iw, marker()).topk(TOP_K, largest=False).indices


def blocks(
    iq: Tensor, ik: Tensor, iw: Tensor, *, heads: int = HEADS, recent: int = 1, past: int = 0
) -> Tensor:
    """[1, heads, T, TOP_BLOCKS]; with `past` the last tokens before each speak for no block."""
    tokens = ik.shape[1]
    place, count = torch.arange(tokens), -(-tokens // SPARSE_BLOCK)
    products = torch.matmul(iq[:, :, :heads].transpose(1, 2), ik[:, None].transpose(-1, -2))
    products = products.masked_fill(place > place[:, None] - past, float("-inf"))
    pad = count * SPARSE_BLOCK - tokens
    products = torch.nn.functional.pad(products, (0, pad), value=float("-inf"))
    scores = products.view(1, heads, tokens, count, SPARSE_BLOCK).amax(-1)
    own = (place // SPARSE_BLOCK)[:, None].expand(1, heads, tokens, 1)
    for i in range(recent):
        scores = scores.scatter(-1, (own - i).clamp(min=0), float("inf"))
    best, numbers = scores.topk(torch.sym_min(TOP_BLOCKS, count), dim=-1)
    return numbers.masked_fill(best == float("-inf"), -1)


def model(choose: Choose, layers: int = 1, window: int = 0, *, sparse_block_size: int = 1) -> Any:
    """Attention to chosen positions; every layer attends to those of the first."""

    def forward(token_ids: Tensor, x: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        q, k, v, *indexer = projected(token_ids, x)
        chosen = choose(*indexer)
        for _ in range(layers):
            caches = (key_cache, value_cache)
            out = attention.overload(
                q, k, v, *caches, 0.3, window, 0, 0.0, None, None, chosen, sparse_block_size
            ).transpose(1, 2)
            q = q + out
        return out

    return trace(forward, **INPUTS)


def paged_values() -> Values:
    """One request of all tokens, in blocks that lie backwards; the caches start as NaN."""
    blocks = -(-TOKENS // BLOCK_SIZE)
    table = torch.arange(blocks).flip(0)
    at = torch.arange(TOKENS)
    sizes = {(0, "key"): (HEADS, DIM), (0, "value"): (HEADS, DIM), (1, "key"): (1, INDEX_DIM)}
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


@pytest.mark.parametrize("score", [weighted, heads_first])
def test_rewrites_and_gives_the_same_numbers(score: Callable[..., Tensor]) -> None:
    found, _ = apply(model(best(score)), FIND, page_attention(block_size=BLOCK_SIZE))
    assert ops(found)["llmc.choose_keys.default"] == 1 and "aten.topk.default" not in ops(found)
    q, k, v, *indexer = projected(INPUTS["token_ids"].tensor, INPUTS["x"].tensor)
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    scores = score(*indexer, causal)[0]
    place = torch.arange(TOKENS)
    allowed = among(scores.topk(TOP_K).indices[:, None], 1, TOKENS)
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    want = attend(q, k, v, place, place, 0.3, 0, 0, 0.0, None, None, allowed)
    got = run(found, paged_values())[0].transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recent", [0, 1])
def test_blocks_of_each_head_give_the_same_numbers(recent: int) -> None:
    choose = partial(blocks, recent=recent)
    passes = FIND, page_attention(block_size=BLOCK_SIZE)
    found, _ = apply(model(choose, sparse_block_size=SPARSE_BLOCK), *passes)
    assert ops(found)["llmc.choose_blocks.default"] == 1
    assert not {"aten.topk.default", "aten.matmul.default"} & ops(found).keys()
    q, k, v, *indexer = projected(INPUTS["token_ids"].tensor, INPUTS["x"].tensor)
    allowed = among(choose(*indexer)[0].transpose(0, 1), SPARSE_BLOCK, TOKENS)
    assert not torch.equal(allowed[0], allowed[1]), "heads choose for themselves"
    place = torch.arange(TOKENS)
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    want = attend(q, k, v, place, place, 0.3, 0, 0, 0.0, None, None, allowed)
    got = run(found, paged_values())[0].transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("choose", "reason"),
    [
        (
            partial(blocks, past=1, recent=0),
            r"random numbers give other blocks.* max_model_len=6 works",
        ),
        (lambda *indexer: blocks(*indexer) * 1 + 1, "random numbers give other blocks"),
        (partial(blocks, heads=3), "2 KV heads and 3 choices of keys"),
    ],
)
def test_refuses_what_chooses_other_blocks(choose: Choose, reason: str) -> None:
    with pytest.raises(CompileError, match=reason):
        apply(model(choose, sparse_block_size=SPARSE_BLOCK), FIND)


def test_layers_that_share_positions_share_the_op_and_its_cache() -> None:
    found, _ = apply(model(best(weighted), layers=3), FIND)
    assert ops(found)["llmc.choose_keys.default"] == 1
    assert ops(found)["llmc.attention.default"] == 3
    assert {(r.layer, r.part) for r in roles(found, CacheInput)} == {
        (0, "key"),
        (0, "value"),
        (1, "key"),
    }


def test_changes_nothing_the_second_time() -> None:
    assert_idempotent(model(best(weighted)), FIND)


def test_a_context_within_the_budget_needs_no_indexer() -> None:
    within = find_indexers(max_positions=TOP_K, block_size=BLOCK_SIZE)
    found, (report,) = apply(model(best(squared)), within)
    assert not {"aten.topk.default", "aten.matmul.default"} & ops(found).keys()
    assert len(roles(found, CacheInput)) == 2
    assert report.notes == (f"topk chooses all of {TOP_K} tokens",)


@pytest.mark.parametrize(
    ("choose", "reason"),
    [
        (best(squared), "random numbers give other scores.* max_model_len=5 works"),
        (best(negated), "random numbers give other scores"),
        (best(weighted, window=4), "it is limited to a window"),
        (best(all_seeing), "it sees later tokens"),
        (shifted, "is not a topk over the scores"),
        (lowest, "is not a topk over the scores"),
    ],
)
def test_refuses_what_chooses_otherwise(choose: Choose, reason: str) -> None:
    with pytest.raises(CompileError, match=reason):
        apply(model(choose), FIND)


def test_refuses_a_window_around_chosen_positions() -> None:
    with pytest.raises(CompileError, match="within a window"):
        apply(model(best(weighted), window=4), FIND)
