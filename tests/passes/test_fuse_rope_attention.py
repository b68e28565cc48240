"""fuse_rope_attention: the op that writes the cache and the attention that reads it become one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_graphs import Values, apply, assert_idempotent, ops, run
from tiny_layer import (
    BLOCK_SIZE,
    INPUTS,
    POSITIONS,
    half_turn,
    layer,
    neighbours,
    paged_values,
    unrotated,
)
from torch import fx

from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.rope_attention import rope_attention
from llmc.kernels.rope_write import rope_write
from llmc.passes.edit import arguments, aten, calls, emit, set_arguments, val
from llmc.passes.fuse_norms import fuse_norms
from llmc.passes.fuse_rope_attention import fuse_rope_attention
from llmc.passes.fuse_rope_write import fuse_rope_write
from llmc.passes.group_caches import cache_groups
from llmc.passes.inputs import ConstantInput, add_input, step_input
from llmc.passes.page_attention import page_attention
from llmc.passes.share_rotary import share_rotary

BOTH = {"llmc.rope_write.default": 1, "llmc.paged_attention.default": 1}


def before(gm: fx.GraphModule) -> fx.GraphModule:
    passes = (
        page_attention(block_size=BLOCK_SIZE),
        share_rotary(max_positions=POSITIONS),
        fuse_norms(),
        fuse_rope_write(),
    )
    return apply(gm, *passes)[0]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary", [half_turn, neighbours])
def test_rewrites(rotary: object, normed: bool) -> None:
    plain = layer(rotary, normed=normed)
    gm = before(plain)
    fused, (report,) = apply(gm, fuse_rope_attention(max_positions=POSITIONS))
    assert report.removed == BOTH and report.added == {"llmc.rope_attention.default": 1}
    assert not report.notes
    want, got = paged_values(), paged_values()
    torch.testing.assert_close(run(fused, got), run(gm, want), rtol=0, atol=0)
    torch.testing.assert_close(got.caches, want.caches, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        run(fused, paged_values()), run(plain, Values.of(**INPUTS)), rtol=1e-5, atol=1e-5
    )
    assert cache_groups(fused.graph) == cache_groups(gm.graph) != ()
    assert_idempotent(gm, fuse_rope_attention(max_positions=POSITIONS))


@pytest.mark.parametrize("normed", ["", "projected", "transposed"])
def test_rewrites_a_layer_without_a_rotary_embedding(normed: str) -> None:
    plain = layer(unrotated, normed=bool(normed), at=normed)
    gm = before(plain)
    assert ops(gm)["llmc.write_kv.default"] == 1
    fused, (report,) = apply(gm, fuse_rope_attention(max_positions=POSITIONS))
    assert report.added["llmc.rope_attention.default"] == 1
    assert "llmc.rms_norm.default" not in ops(fused)
    (attend,) = calls(fused.graph, rope_attention.overload)
    assert (arguments(attend).key_norm is not None) == bool(normed)
    want, got = paged_values(), paged_values()
    torch.testing.assert_close(run(fused, got), run(gm, want), rtol=0, atol=0)
    torch.testing.assert_close(got.caches, want.caches, rtol=0, atol=0, equal_nan=True)
    assert cache_groups(fused.graph) == cache_groups(gm.graph) != ()
    assert_idempotent(gm, fuse_rope_attention(max_positions=POSITIONS))


def test_the_hint_of_prompts_is_kept() -> None:
    gm = before(layer())
    (attend,) = calls(gm.graph, paged_attention.overload)
    set_arguments(attend, prompts=step_input(gm.graph, "prompts"))
    fused, _ = apply(gm, fuse_rope_attention(max_positions=POSITIONS))
    (node,) = calls(fused.graph, rope_attention.overload)
    assert arguments(node).prompts.name == arguments(attend).prompts.name


def _also_returned(gm: fx.GraphModule, node: fx.Node) -> None:
    output = gm.graph.output_node()
    output.args = ((output.args[0], node),)


def _read_query(gm: fx.GraphModule, write: fx.Node, attend: fx.Node) -> None:
    _also_returned(gm, write)


def _read_cache(gm: fx.GraphModule, write: fx.Node, attend: fx.Node) -> None:
    with gm.graph.inserting_before(attend):
        total = emit(gm.graph, aten.sum.default, arguments(attend).key_cache)
    _also_returned(gm, total)


def _other_cache(gm: fx.GraphModule, write: fx.Node, attend: fx.Node) -> None:
    set_arguments(attend, value_cache=arguments(attend).key_cache)


def _other_blocks(gm: fx.GraphModule, write: fx.Node, attend: fx.Node) -> None:
    like = val(arguments(attend).block_table)
    set_arguments(attend, block_table=step_input(gm.graph, "block_table_1", like))


def _bias(gm: fx.GraphModule, write: fx.Node, attend: fx.Node) -> None:
    numbers = torch.zeros(1, 4, 9)
    fake = val(write).new_empty(numbers.shape)
    bias = add_input(gm.graph, "bias", ConstantInput(tensor=numbers), fake)
    set_arguments(attend, distance_bias=bias)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_read_query, "the rotated query is read elsewhere"),
        (_read_cache, "the cache is read before it"),
        (_other_cache, "other caches"),
        (_other_blocks, "not those that were written"),
        (_bias, "with a bias"),
    ],
)
def test_leaves_alone_and_says_why(
    change: Callable[[fx.GraphModule, fx.Node, fx.Node], None], reason: str
) -> None:
    gm = before(layer())
    (write,) = calls(gm.graph, rope_write.overload)
    (attend,) = calls(gm.graph, paged_attention.overload)
    change(gm, write, attend)
    same, (report,) = apply(gm, fuse_rope_attention(max_positions=POSITIONS))
    assert not report.added and ops(same)["llmc.paged_attention.default"] == 1
    (note,) = report.notes
    assert reason in note


def test_rests_where_it_is_unwanted() -> None:
    _, (report,) = apply(
        before(layer()), fuse_rope_attention(max_positions=POSITIONS, unwanted="no GPU")
    )
    assert not report.added and report.notes == ("no GPU",)
