"""absorb_mla: attention over all heads' keys and values becomes attention over their latent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import (
    Arg,
    Values,
    apply,
    assert_idempotent,
    assert_same,
    cache,
    ops,
    run,
    step,
    trace,
    weight,
)
from torch import Tensor, fx

from llmc.kernels.attention import attention
from llmc.passes.absorb_mla import absorb_mla
from llmc.passes.inputs import CacheInput, input_of
from llmc.passes.page_attention import page_attention

TOKENS, HEADS, RANK, DIM, ROTARY, V_DIM, BLOCK_SIZE = 7, 4, 12, 6, 4, 5, 4
GEN = torch.Generator().manual_seed(0)
ABSORB = absorb_mla()


def _rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GEN)


INPUTS: dict[str, Arg] = {
    "token_ids": step(torch.arange(TOKENS)),
    "query": step(_rand(1, HEADS, TOKENS, DIM + ROTARY), dynamic=2),
    "latent": step(_rand(1, TOKENS, RANK), dynamic=1),
    "rotary": step(_rand(1, 1, TOKENS, ROTARY), dynamic=2),
    "up": weight("up", _rand(HEADS * (DIM + V_DIM), RANK)),
    "key_cache": cache(0, "key"),
    "value_cache": cache(0, "value"),
}


def latent_attention(
    *, layers: int = 1, in_parts: bool = False, bias: bool = False, chosen: bool = False,
    keys_first: bool = True, reads_more: bool = False, of_tokens: bool = False,
) -> fx.GraphModule:  # fmt: skip
    """[1, T, H * Dv] of attention whose keys and values come from `latent`."""

    def forward(
        token_ids: Tensor, query: Tensor, latent: Tensor, rotary: Tensor, up: Tensor,
        key_cache: Tensor, value_cache: Tensor,
    ) -> Tensor:  # fmt: skip
        query = query + 0 * token_ids[:, None]
        made = F.linear(latent, up, up[:, 0] if bias else None)
        by_head = made.view(1, -1, HEADS, DIM + V_DIM).transpose(1, 2)
        own, value = by_head.split([DIM, V_DIM], dim=-1)
        shared = rotary.expand(-1, HEADS, -1, -1)
        key = torch.cat((own, shared) if keys_first else (shared, own), dim=-1)
        if in_parts:
            query = torch.cat((query[..., :DIM] * 1.5, query[..., DIM:]), dim=-1)
        numbers = torch.zeros(TOKENS, 1, 1, dtype=torch.int32) if chosen else None
        bias_of_tokens = query.new_zeros(1, HEADS, query.shape[2], 2) if of_tokens else None
        out = query.new_zeros(())
        for _ in range(layers):
            caches = (key_cache, value_cache)
            out = out + attention.overload(
                query, key, value, *caches, 0.3, 3, 0, 0.0, None, None, numbers,
                distance_bias=bias_of_tokens,
            )  # fmt: skip
        return out.flatten(2) + (up.sum() if reads_more else 0)

    return trace(forward, **INPUTS)


@pytest.mark.parametrize("in_parts", [False, True], ids=["one query", "a query in parts"])
def test_the_numbers_are_the_same(in_parts: bool) -> None:
    gm = latent_attention(in_parts=in_parts)
    absorbed, (report,) = apply(gm, ABSORB)
    assert report.removed["aten.linear.default"] == 1
    assert "1 layers cache 16 values per token instead of 60" in report.notes
    assert_same(absorbed, gm, Values.of(**INPUTS))
    assert_idempotent(gm, ABSORB)


def test_a_cache_holds_the_latent_once() -> None:
    gm = latent_attention()
    paged, _ = apply(gm, ABSORB, page_attention(block_size=BLOCK_SIZE))
    roles = {n: input_of(n) for n in paged.graph.nodes if n.op == "placeholder"}
    shapes = {r.part: n.meta["val"].shape for n, r in roles.items() if isinstance(r, CacheInput)}
    assert tuple(shapes["key"][1:]) == (1, BLOCK_SIZE, RANK + ROTARY)
    assert tuple(shapes["value"][1:]) == (1, BLOCK_SIZE, 0)
    position = torch.arange(TOKENS)
    blocks = torch.tensor([[2, 0]], dtype=torch.int32)
    caches = {
        (0, part): torch.full((4, *shape[1:]), float("nan")) for part, shape in shapes.items()
    }
    values = Values.of(
        caches,
        **INPUTS,
        slot_mapping=step(blocks[0, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % 4),
        query_start=step(torch.tensor([0, TOKENS], dtype=torch.int32)),
        context_len=step(torch.tensor([TOKENS], dtype=torch.int32)),
        block_table=step(blocks),
    )
    want = run(gm, Values.of(**INPUTS))
    torch.testing.assert_close(run(paged, values), want, rtol=1e-5, atol=1e-5)


def test_layers_that_share_keys_and_values_go_on_sharing_them() -> None:
    gm = latent_attention(layers=2)
    absorbed, _ = apply(gm, ABSORB)
    assert_same(absorbed, gm, Values.of(**INPUTS))
    paged, (report,) = apply(absorbed, page_attention(block_size=BLOCK_SIZE))
    assert ops(paged)["llmc.write_kv.default"] == 1
    assert "reads the keys and values of an earlier layer" in str(report)


def test_a_latent_is_not_stored_in_int8() -> None:
    absorbed, _ = apply(latent_attention(), ABSORB)
    paging = page_attention(block_size=BLOCK_SIZE, cache_dtype=torch.int8)
    _, (report,) = apply(absorbed, paging)
    assert "the cache is float32, not int8: values are channels of the keys" in str(report)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"chosen": True}, "a sparse indexer chooses their keys"),
        ({"of_tokens": True}, "they have a per-token position bias or per-token sinks"),
        ({"reads_more": True}, "is computed, or is also used elsewhere"),
        ({"bias": True}, ""),
        ({"keys_first": False}, ""),
    ],
    ids=str,
)
def test_other_layers_stay(how: dict[str, Any], reason: str) -> None:
    absorbed, (report,) = apply(latent_attention(**how), ABSORB)
    assert not report.changed and "llmc.attention.default" in ops(absorbed)
    assert reason in " ".join(report.notes) if reason else not report.notes


def test_it_says_why_it_did_nothing() -> None:
    _, (report,) = apply(latent_attention(), absorb_mla(unwanted="each rank has its own heads"))
    assert not report.changed and "1 layers not rewritten: each rank has its own" in str(report)
