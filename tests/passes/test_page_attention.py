"""page_attention: markers become a cache write and attention over block tables."""

from __future__ import annotations

import pytest
import torch
from tiny_graphs import Values, apply, cache, ops, roles, run, step, trace
from tiny_layer import BLOCK_SIZE, DIM, INPUTS, KV_HEADS, layer, paged_values
from torch import Tensor

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.passes.inputs import CacheInput, StepInput, input_of
from llmc.passes.page_attention import page_attention

PAGE = page_attention(block_size=BLOCK_SIZE)


def test_rewrites_and_gives_the_same_numbers() -> None:
    """The caches start as NaN: what attention reads must have been written in the step."""
    gm = layer()
    paged, (report,) = apply(gm, PAGE)
    assert report.removed["llmc.attention.default"] == 1
    assert report.added["llmc.write_kv.default"] == 1
    assert report.added["llmc.paged_attention.default"] == 1
    got, want = run(paged, paged_values()), run(gm, Values.of(**INPUTS))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_names_the_step_inputs_and_shapes_the_caches() -> None:
    paged, _ = apply(layer(), PAGE)
    names = {role.name for role in roles(paged, StepInput)}
    assert names == {
        "token_ids",
        "positions",
        "slot_mapping",
        "query_start",
        "context_len",
        "block_table",
    }
    caches = [n for n in paged.graph.nodes if isinstance(input_of(n), CacheInput)]
    assert [tuple(n.meta["val"].shape)[1:] for n in caches] == [(KV_HEADS, BLOCK_SIZE, DIM)] * 2


def test_the_input_graph_is_left_as_it_was() -> None:
    gm = layer()
    before = ops(gm)
    apply(gm, PAGE)
    assert ops(gm) == before


def _no_attention(token_ids: Tensor) -> Tensor:
    return token_ids.unsqueeze(0) * 2


def _twice(token_ids: Tensor, q: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    for _ in range(2):
        q = attention.overload(
            q, q, q, key_cache, value_cache, 1.0, 0, 0, 0.0, None, None
        ).transpose(1, 2)
    return q + token_ids[:, None]


def test_a_module_that_attends_twice_has_two_caches() -> None:
    gm = trace(
        _twice,
        token_ids=INPUTS["token_ids"],
        q=step(torch.randn(1, 2, 7, DIM), dynamic=2),
        key_cache=cache(0, "key"),
        value_cache=cache(0, "value"),
    )
    paged, (report,) = apply(gm, PAGE)
    assert {(r.layer, r.part) for r in roles(paged, CacheInput)} == {
        (layer, part) for layer in (0, 1) for part in ("key", "value")
    }
    assert ops(paged)["llmc.write_kv.default"] == 2
    assert any("called twice" in note for note in report.notes)


def test_a_layer_that_shares_keys_and_values_reads_the_cache_of_the_first() -> None:
    def shared(token_ids: Tensor, q: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        first = attention.overload(q, q, q, a, b, 1.0, 5, 0, 0.0, None, None).transpose(1, 2)
        then = attention.overload(first, q, q, c, d, 1.0, 0, 0, 0.0, None, None).transpose(1, 2)
        return then + token_ids[:, None]

    gm = trace(
        shared,
        token_ids=INPUTS["token_ids"],
        q=step(torch.randn(1, 2, 7, DIM), dynamic=2),
        a=cache(0, "key"),
        b=cache(0, "value"),
        c=cache(1, "key"),
        d=cache(1, "value"),
    )
    paged, _ = apply(gm, PAGE)
    assert {r.layer for r in roles(paged, CacheInput)} == {0}
    assert ops(paged)["llmc.write_kv.default"] == 1
    assert ops(paged)["llmc.paged_attention.default"] == 2


def test_a_marker_without_a_cache_is_refused() -> None:
    gm = trace(
        lambda token_ids, q, c: (
            token_ids[:, None]
            + attention.overload(q, q, q, c + 1, c + 1, 1.0, 0, 0, 0.0, None, None).transpose(1, 2)
        ),
        token_ids=INPUTS["token_ids"],
        q=step(torch.randn(1, 2, 7, DIM), dynamic=2),
        c=cache(0, "key"),
    )
    with pytest.raises(CompileError, match="has no cache"):
        apply(gm, PAGE)
