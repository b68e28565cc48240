"""fuse_rope_write: rotary and cache write of a layer that attends to latents become one op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import (
    Arg,
    Values,
    apply,
    assert_idempotent,
    cache,
    constant,
    ops,
    run,
    step,
    trace,
    weight,
)
from tiny_layer import complex_product, half_turn, moved_neighbours, neighbours, norm, rows_of
from torch import Tensor, fx

from llmc.kernels.attention import attention
from llmc.passes.absorb_mla import absorb_mla
from llmc.passes.fuse_norms import fuse_norms
from llmc.passes.fuse_rope_attention import fuse_rope_attention
from llmc.passes.fuse_rope_write import fuse_rope_write
from llmc.passes.group_caches import cache_groups
from llmc.passes.page_attention import page_attention
from llmc.passes.share_rotary import share_rotary

TOKENS, HEADS, HIDDEN, RANK, DIM, ROTARY, V_DIM = 7, 4, 16, 12, 6, 4, 5
BLOCK_SIZE, POSITIONS = 4, 32
GEN = torch.Generator().manual_seed(0)


def _rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GEN)


INPUTS: dict[str, Arg] = {
    "token_ids": step(torch.randint(0, 20, (TOKENS,), generator=GEN)),
    "positions": step(torch.arange(TOKENS)),
    "embed": weight("embed", _rand(20, HIDDEN)),
    "wq": weight("wq", _rand(HEADS * (DIM + ROTARY), HIDDEN)),
    "wc": weight("wc", _rand(RANK + ROTARY, HIDDEN)),
    "gain": weight("gain", _rand(RANK)),
    "up": weight("up", 0.3 * _rand(HEADS * (DIM + V_DIM), RANK)),
    "inv_freq": constant(10.0 ** -(torch.arange(0, ROTARY, 2) / ROTARY)),
    "key_cache": cache(0, "key"),
    "value_cache": cache(0, "value"),
}


def layer(
    rotary: object, *, normed: bool = True, scaled: bool = False, twice: bool = False,
    other: object = None,
) -> fx.GraphModule:  # fmt: skip
    """[1, T, H * Dv] of attention to latents. scaled: both parts of a query are, on their own;
    twice: a second layer reads the same keys; other: how keys are rotated."""

    def forward(
        token_ids: Tensor, positions: Tensor, embed: Tensor, wq: Tensor, wc: Tensor, gain: Tensor,
        up: Tensor, inv_freq: Tensor, key_cache: Tensor, value_cache: Tensor,
    ) -> Tensor:  # fmt: skip
        x = F.embedding(token_ids.unsqueeze(0), embed)
        q = F.linear(x, wq).view(1, -1, HEADS, DIM + ROTARY).transpose(1, 2)
        plain, turned = q.split([DIM, ROTARY], dim=-1)
        if scaled:
            plain, turned = plain * 1.5, turned * 1.5
        latent, shared = F.linear(x, wc).split([RANK, ROTARY], dim=-1)
        latent = norm(latent, gain) if normed else latent
        own, value = (
            F.linear(latent, up).view(1, -1, HEADS, DIM + V_DIM).transpose(1, 2)
            .split([DIM, V_DIM], dim=-1)
        )  # fmt: skip
        rows = rows_of(positions, inv_freq, rotary)
        query = torch.cat((plain, rotary(turned, *rows)), dim=-1)  # type: ignore[operator]
        turn = other or rotary
        shared = turn(shared.view(1, 1, -1, ROTARY), *rows)  # type: ignore[operator]
        key = torch.cat((own, shared.expand(-1, HEADS, -1, -1)), dim=-1)
        caches = (key_cache, value_cache)
        given = (0.3, 3, 0, 0.0, None, None)
        out = attention.overload(query, key, value, *caches, *given)
        if twice:
            out = out + attention.overload(query * 0.5, key, value, *caches, *given)
        return out.flatten(2)

    return trace(forward, **INPUTS)


def before(gm: fx.GraphModule) -> fx.GraphModule:
    passes = (
        absorb_mla(),
        page_attention(block_size=BLOCK_SIZE),
        share_rotary(max_positions=POSITIONS),
        fuse_norms(),
    )
    return apply(gm, *passes)[0]


def paged_values() -> Values:
    """The tokens as one request whose blocks are in arbitrary order; the third is padding."""
    blocks = torch.tensor([[2, 0]], dtype=torch.int32)
    position = torch.arange(TOKENS)
    caches = {
        (0, "key"): torch.full((4, 1, BLOCK_SIZE, RANK + ROTARY), float("nan")),
        (0, "value"): torch.zeros(4, 1, BLOCK_SIZE, 0),
    }
    return Values.of(
        caches,
        **INPUTS,
        slot_mapping=step(blocks[0, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % 4),
        query_start=step(torch.tensor([0, TOKENS], dtype=torch.int32)),
        context_len=step(torch.tensor([TOKENS], dtype=torch.int32)),
        block_table=step(blocks),
    )


def assert_equal_to(plain: fx.GraphModule, made: fx.GraphModule) -> None:
    want = run(plain, Values.of(**INPUTS))
    torch.testing.assert_close(run(made, paged_values()), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary", [half_turn, neighbours, moved_neighbours, complex_product])
def test_rewrites(rotary: object, normed: bool) -> None:
    plain = layer(rotary, normed=normed)
    gm = before(plain)
    fused, (report,) = apply(gm, fuse_rope_write())
    assert report.added["llmc.rope_write_latent.default"] == 1 and not report.notes
    gone = {"aten.mul.Tensor", "aten.cat.default", "llmc.rms_norm.default", "aten.polar.default"}
    assert not gone & set(ops(fused)) and report.removed["llmc.write_kv.default"] == 1
    assert_equal_to(plain, fused)
    assert_idempotent(gm, fuse_rope_write())


def test_parts_of_a_query_that_are_not_neighbours_are_joined() -> None:
    plain = layer(moved_neighbours, scaled=True)
    fused, (report,) = apply(before(plain), fuse_rope_write())
    assert report.added["llmc.rope_write_latent.default"] == 1
    assert ops(fused)["aten.cat.default"] == 1
    assert_equal_to(plain, fused)


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"rotary": half_turn, "other": neighbours}, "query and key rotate differently"),
        (
            {"rotary": half_turn, "other": lambda x, cos, sin: x * cos.unsqueeze(1)},
            "no rotary embedding of a known form",
        ),
        (
            {"rotary": moved_neighbours, "twice": True},
            "other layers read keys whose channels the model reorders",
        ),
    ],
    ids=["two ways", "unknown", "shared keys"],
)
def test_leaves_alone_and_says_why(given: dict[str, object], reason: str) -> None:
    plain = layer(**given)  # type: ignore[arg-type]
    left, (report,) = apply(before(plain), fuse_rope_write())
    assert not report.added and [note.partition(": ")[2] for note in report.notes] == [reason]
    assert_equal_to(plain, left)


def test_keys_in_the_model_s_order_may_have_more_readers() -> None:
    plain = layer(half_turn, twice=True)
    fused, (report,) = apply(before(plain), fuse_rope_write())
    assert report.added["llmc.rope_write_latent.default"] == 1
    assert_equal_to(plain, fused)


@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_attention_become_one_op(normed: bool) -> None:
    plain = layer(neighbours, normed=normed)
    gm = apply(before(plain), fuse_rope_write())[0]
    fused, (report,) = apply(gm, fuse_rope_attention(max_positions=POSITIONS))
    both = {"llmc.rope_write_latent.default": 1, "llmc.latent_attention.default": 1}
    assert report.removed == both and not report.notes
    assert report.added == {"llmc.rope_latent_attention.default": 1}
    assert cache_groups(fused.graph) == cache_groups(gm.graph) != ()
    assert_equal_to(plain, fused)
    assert_idempotent(gm, fuse_rope_attention(max_positions=POSITIONS))


def test_a_second_attention_reads_what_the_fused_op_wrote() -> None:
    plain = layer(half_turn, twice=True)
    fused, _ = apply(before(plain), fuse_rope_write(), fuse_rope_attention(max_positions=POSITIONS))
    assert ops(fused)["llmc.rope_latent_attention.default"] == 1
    assert ops(fused)["llmc.latent_attention.default"] == 1
    assert_equal_to(plain, fused)
