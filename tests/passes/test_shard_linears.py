"""shard_linears: what is cut, that the sum over the ranks is what it was, and what stays whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from tiny_graphs import (
    Arg,
    Values,
    apply,
    assert_idempotent,
    constant,
    roles,
    run,
    step,
    trace,
    weight,
)
from torch import Tensor, fx

from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.write_kv import write_kv
from llmc.passes.inputs import CacheInput, Shard, WeightInput
from llmc.passes.merge_linears import merge_linears
from llmc.passes.shard_linears import shard_linears

HIDDEN, WIDTH, TOKENS, DIM, BLOCK = 16, 24, 5, 4, 8


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.3


X = step(rand(1, TOKENS, HIDDEN), dynamic=1)


def check(
    inputs: Mapping[str, Arg],
    fn: Callable[..., Any],
    size: int,
    caches: Mapping[tuple[int, str], Tensor] | None = None,
) -> tuple[fx.GraphModule, Any]:
    """The sharded graph, whose ranks give together what `fn` gives; and the pass's report."""
    gm = trace(fn, **inputs)
    values = Values.of(caches=caches, **inputs)
    sharded, (report,) = apply(gm, shard_linears(size=size))
    merged, _ = apply(sharded, merge_linears())
    want = run(gm, values)
    local = {
        n.meta["input"]: n.meta["val"].shape for n in sharded.graph.find_nodes(op="placeholder")
    }

    def of_rank(group: Any) -> Any:
        own = {
            (role.layer, role.part): torch.zeros([int(n) for n in shape])
            for role, shape in local.items()
            if isinstance(role, CacheInput)
        }
        mine = replace(values, rank=group.rank, caches=own)
        return run(sharded, mine), run(merged, mine)

    for results in on_ranks(size, of_rank):
        for got in results:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert_idempotent(gm, shard_linears(size=size))
    return sharded, report


def shards(gm: fx.GraphModule) -> dict[str, Shard | None]:
    return {name: shard for role in roles(gm, WeightInput) for name, shard in role.pieces}


def cut(dim: int, *sections: tuple[int, int], size: int = 2) -> Shard:
    return Shard(dim=dim, sections=sections, size=size)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


GATED = {
    "x": X,
    "gate": weight("gate", rand(WIDTH, HIDDEN)),
    "up": weight("up", rand(WIDTH, HIDDEN)),
    "down": weight("down", rand(HIDDEN, WIDTH)),
}


@pytest.mark.parametrize("size", [2, 4])
def test_an_elementwise_path_between_linears_is_cut(size: int) -> None:
    sharded, report = check(GATED, gated, size)
    assert report.added == {"llmc.all_reduce.default": 1}
    rows = cut(0, (WIDTH, size), size=size)
    assert shards(sharded) == {
        "gate": rows, "up": rows, "down": cut(1, (WIDTH, size), size=size)
    }  # fmt: skip


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_terms_that_are_added_are_summed_together(scaled: bool) -> None:
    """As of attention and MLP in parallel, or of routed and shared experts."""
    second = {f"{name}2": weight(f"{name}2", rand(*shape)) for name, shape in (
        ("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))
    )}  # fmt: skip
    inputs = {**GATED, **second, "bias": weight("bias", rand(HIDDEN))}

    def parallel(x: Tensor, *weights: Tensor) -> Tensor:
        one, two = gated(x, *weights[:3]), gated(x, *weights[3:6])
        if scaled:
            two = torch.sigmoid(x.sum(-1, keepdim=True)) * two.reshape(1, *x.shape)[0]
        return (one + x) + (two + weights[6])

    _, report = check(inputs, parallel, 2)
    assert report.added["llmc.all_reduce.default"] == 1
    assert report.added.get("aten.add.Tensor", 0) == report.removed.get("aten.add.Tensor", 0)


def test_terms_that_others_read_too_are_summed_apart() -> None:
    inputs = {**GATED, "down2": weight("down2", rand(HIDDEN, WIDTH))}

    def fn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, down2: Tensor) -> Tensor:
        one, two = gated(x, gate, up, down), gated(x, gate, up, down2)
        return (one + two) * F.silu(one)

    _, report = check(inputs, fn, 2)
    assert report.added == {"llmc.all_reduce.default": 2}


def test_one_rank_changes_nothing() -> None:
    gm = trace(gated, **GATED)
    _, (report,) = apply(gm, shard_linears())
    assert not report.added and report.notes == ("--tensor-parallel-size is 1",)


def test_a_width_that_does_not_divide_stays_whole() -> None:
    sharded, report = check(GATED, gated, 5)
    assert not report.added and not any(shards(sharded).values())


def test_biases_are_added_once() -> None:
    inputs = {
        "x": X,
        "w": weight("w", rand(WIDTH, HIDDEN)),
        "b": weight("b", rand(WIDTH)),
        "v": weight("v", rand(HIDDEN, WIDTH)),
        "c": weight("c", rand(HIDDEN)),
    }
    sharded, report = check(
        inputs, lambda x, w, b, v, c: F.linear(F.gelu(F.linear(x, w, b)), v, c) + x, 2
    )
    assert report.added == {"llmc.all_reduce.default": 1, "aten.add.Tensor": 1}
    assert shards(sharded)["b"] == cut(0, (WIDTH, 2)) and shards(sharded)["c"] is None


@pytest.mark.parametrize("interleaved", [False, True])
def test_halves_of_one_output(interleaved: bool) -> None:
    def fused(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
        y = F.linear(x, both)
        a, b = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
        return F.linear(F.silu(a) * b, down)

    inputs = {
        "x": X,
        "both": weight("both", rand(2 * WIDTH, HIDDEN)),
        "down": weight("down", rand(HIDDEN, WIDTH)),
    }
    sharded, _ = check(inputs, fused, 2)
    halves = ((2 * WIDTH, 2),) if interleaved else ((WIDTH, 2), (WIDTH, 2))
    assert shards(sharded)["both"] == cut(0, *halves)


def test_a_constant_by_channel_is_cut_with_them() -> None:
    inputs = {**GATED, "scale": constant(rand(WIDTH))}
    sharded, _ = check(
        inputs,
        lambda x, gate, up, down, scale: F.linear(
            F.silu(F.linear(x, gate)) * scale * F.linear(x, up), down
        ),
        2,
    )
    assert shards(sharded)["gate"] is not None


@pytest.mark.parametrize(
    "between",
    [
        lambda y: y / y.pow(2).mean(-1, keepdim=True).sqrt(),
        lambda y: y.softmax(-1),
        lambda y: y.cumsum(-1),
        lambda y: torch.cat([y, y], 1)[:, : y.shape[1]],
        lambda y: y.flip(-1),
        lambda y: y.view(1, -1, 2, WIDTH // 2).transpose(2, 3).reshape(y.shape),
    ],
)
def test_what_mixes_channels_stays_whole(between: Callable[[Tensor], Tensor]) -> None:
    inputs = {
        "x": X,
        "w": weight("w", rand(WIDTH, HIDDEN)),
        "v": weight("v", rand(HIDDEN, WIDTH)),
    }
    _, report = check(inputs, lambda x, w, v: F.linear(between(F.linear(x, w)), v), 2)
    assert "llmc.all_reduce.default" not in report.added


def test_a_hidden_state_that_something_else_reads_stays_whole() -> None:
    inputs = {
        "x": X,
        "w": weight("w", rand(WIDTH, HIDDEN)),
        "v": weight("v", rand(HIDDEN, WIDTH)),
    }

    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = F.silu(F.linear(x, w))
        return F.linear(y, v), x, y

    _, report = check(inputs, fn, 2)
    assert not report.added


def test_a_weight_that_two_ops_read_in_two_ways_stays_whole() -> None:
    inputs = {"x": step(rand(1, TOKENS, WIDTH), dynamic=1), "w": weight("w", rand(WIDTH, WIDTH))}
    _, report = check(inputs, lambda x, w: F.linear(F.silu(F.linear(x, w)), w), 2)
    assert not report.added


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [30, 31])
def test_embedding_and_head_are_cut_by_the_vocabulary(tied: bool, vocab: int) -> None:
    def fn(token_ids: Tensor, table: Tensor, head: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        h = F.embedding(token_ids.unsqueeze(0), table) * 2
        y = F.linear(h, table) if tied else F.linear(h, head, bias)
        logits = (torch.tanh(y / 30.0) * 30.0).squeeze(0)
        return logits.argmax(-1), logits

    inputs = {
        "token_ids": step(torch.tensor([0, 29, 14, 15, 3])),
        "table": weight("table", rand(vocab, HIDDEN)),
        "head": weight("head", rand(vocab, HIDDEN) + 0.1),
        "bias": weight("bias", rand(vocab)),
    }
    sharded, report = check(inputs, fn, 2)
    if vocab == 31:
        assert not report.added
        return
    assert report.added["llmc.embed_shard.default"] == 1
    assert report.added["llmc.all_reduce.default"] == report.added["llmc.all_gather.default"] == 1
    rows = cut(0, (vocab, 2))
    found = shards(sharded)
    assert found["table"] == rows and (tied or (found["head"], found["bias"]) == (rows, None))


def test_a_table_that_is_read_in_another_way_stays_whole() -> None:
    inputs = {
        "token_ids": step(torch.tensor([0, 5, 3])),
        "positions": step(torch.tensor([0, 1, 2])),
        "table": weight("table", rand(30, HIDDEN)),
        "places": weight("places", rand(30, HIDDEN)),
    }

    def fn(token_ids: Tensor, positions: Tensor, table: Tensor, places: Tensor) -> Tensor:
        return F.embedding(token_ids, table) + F.embedding(positions, places) + table.sum(0)

    _, report = check(inputs, fn, 2)
    assert not report.added


def attend(
    heads: int, kv_heads: int, *, fused: bool, of_tokens: bool = False
) -> tuple[dict[str, Arg], Any, Any]:
    """One layer's attention over a cache that its own tokens fill; with a bias for 3 distances and
    sinks of tokens."""
    q, kv = heads * DIM, kv_heads * DIM

    def fn(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, *rest: Tensor) -> Tensor:
        key_cache, value_cache, slots, query_start, context_len, table, *own = rest
        if fused:
            every = F.linear(x, wq)
            parts = (every[..., :q], every[..., q : q + kv], every[..., q + kv :])
        else:
            parts = (F.linear(x, wq), F.linear(x, wk), F.linear(x, wv))
        query, key, value = (p.view(1, -1, p.shape[-1] // DIM, DIM).squeeze(0) for p in parts)
        key = key / key.pow(2).mean(-1, keepdim=True).sqrt()
        write_kv(key, value, key_cache, value_cache, slots)
        bias = sinks = None
        if own:
            bias = F.linear(x, own[0]).view(1, -1, heads, 2).squeeze(0) @ own[1]
            sinks = F.linear(x, own[2]).squeeze(0)
        out = paged_attention(
            query, key_cache, value_cache, query_start, context_len, table, 0.5, 0, 0, 0.0,
            sinks, None, None, None, None, None, 1, 0, bias,
        )  # fmt: skip
        return F.linear(out.unsqueeze(0).reshape(1, -1, q), wo)

    def half(part: Any) -> Arg:
        shape = (2, kv_heads, BLOCK, DIM)
        return Arg(tensor=torch.zeros(shape), role=CacheInput(layer=0, part=part))

    inputs = {
        "x": X,
        "wq": weight("q", rand(q + 2 * kv if fused else q, HIDDEN)),
        "wk": weight("k", rand(kv, HIDDEN)),
        "wv": weight("v", rand(kv, HIDDEN) + 0.1),
        "wo": weight("o", rand(HIDDEN, q)),
        "key_cache": half("key"),
        "value_cache": half("value"),
        "slot_mapping": step(torch.arange(TOKENS) + BLOCK),
        "query_start": step(torch.tensor([0, TOKENS], dtype=torch.int32), dynamic=None),
        "context_len": step(torch.tensor([TOKENS], dtype=torch.int32), dynamic=None),
        "block_table": step(torch.tensor([[1]], dtype=torch.int32), dynamic=None),
    }
    if of_tokens:
        inputs |= {
            "wr": weight("r", rand(2 * heads, HIDDEN)),
            "profiles": weight("profiles", rand(2, 3)),
            "ws": weight("s", rand(heads, HIDDEN)),
        }
    caches = {(0, part): torch.zeros(2, kv_heads, BLOCK, DIM) for part in ("key", "value")}
    return inputs, fn, caches


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 2), (4, 2, 2), (4, 2, 4), (4, 1, 2), (6, 3, 3)]
)
def test_attention_is_cut_by_heads(heads: int, kv_heads: int, size: int, fused: bool) -> None:
    inputs, fn, caches = attend(heads, kv_heads, fused=fused)
    sharded, report = check(inputs, fn, size, caches)
    assert report.added["llmc.all_reduce.default"] == 1
    kept = {
        n.meta["val"].shape[1]
        for n in sharded.graph.find_nodes(op="placeholder")
        if isinstance(n.meta["input"], CacheInput)
    }
    assert kept == {max(1, kv_heads // size)}
    assert shards(sharded)["o"] == cut(1, (heads * DIM, size), size=size)


def test_biases_and_sinks_of_tokens_are_cut_by_heads() -> None:
    inputs, fn, caches = attend(4, 2, fused=False, of_tokens=True)
    sharded, report = check(inputs, fn, 2, caches)
    assert report.added["llmc.all_reduce.default"] == 1 and not report.notes
    kept = shards(sharded)
    assert (kept["r"], kept["s"], kept["profiles"]) == (cut(0, (8, 2)), cut(0, (4, 2)), None)


def test_heads_that_do_not_divide_stay_whole() -> None:
    inputs, fn, caches = attend(6, 2, fused=False)
    _, report = check(inputs, fn, 4, caches)
    assert not report.added
    assert report.notes == (
        "1 x attention stays whole: 6 heads and 2 KV heads are not divisible by 4",
    )
