"""find_entries, page_entries: entries beside tokens, in one cache, give what one softmax gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny_graphs import Arg, Values, apply, assert_idempotent, cache, ops, roles, run, step, trace
from torch import Tensor

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.kernels.entries import entries, entry_attention
from llmc.passes.find_entries import find_entries
from llmc.passes.inputs import CacheInput
from llmc.passes.page_entries import page_entries

TOKENS, HEADS, DIM, INDEX_HEADS, INDEX_DIM, WINDOW = 41, 2, 6, 3, 4, 5
BLOCK_SIZE = 8
WIDTHS = [HEADS * DIM, DIM, DIM, INDEX_HEADS * INDEX_DIM, INDEX_DIM, INDEX_HEADS]
INPUTS: Mapping[str, Arg] = {
    "token_ids": step(torch.arange(TOKENS)),
    "x": step(
        torch.randn(TOKENS, sum(WIDTHS), generator=torch.Generator().manual_seed(0)), dynamic=0
    ),
    "key_cache": cache(0, "key"),
    "value_cache": cache(0, "value"),
}


def model(rate: int, top_k: int, *, window: int = WINDOW, chunk: int = 0) -> Any:
    """A layer whose attention is handed entries behind the keys of the tokens."""

    def forward(token_ids: Tensor, x: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        x = x + 0.1 * token_ids[:, None]
        q, k, entry, iq, ik, iw = x.split(WIDTHS, -1)
        index = (iq.unflatten(-1, (INDEX_HEADS, INDEX_DIM)), ik, iw) if top_k else (None,) * 3
        rows = entries.overload(entry, *index, rate, top_k)[None, None]
        both = torch.cat([k[None, None], rows], dim=2)
        q = q.unflatten(-1, (HEADS, DIM)).transpose(0, 1)[None]
        given = (0.3, window, chunk, 0.0, x[0, :HEADS], None)
        return attention.overload(q, both, both, key_cache, value_cache, *given)

    return trace(forward, **INPUTS)


def paging(**options: Any) -> Any:
    return page_entries(**{"block_size": BLOCK_SIZE, "max_positions": TOKENS + 7, **options})


def caches_of(gm: Any) -> dict[tuple[int, str], Tensor]:
    """In six blocks, full of NaN."""
    found = {}
    for node in gm.graph.nodes:
        role = node.meta.get("input")
        if isinstance(role, CacheInput):
            shape = (6, *(int(n) for n in node.meta["val"].shape[1:]))
            found[role.layer, str(role.part)] = torch.full(shape, float("nan"))
    return found


def paged(gm: Any, *bounds: int) -> Tensor:
    """The tokens of one request in steps that end at `bounds`, in blocks that lie backwards."""
    table = torch.arange(6).flip(0)
    caches = caches_of(gm)
    outs = []
    for first, last in zip((0, *bounds[:-1]), bounds, strict=True):
        at = torch.arange(first, last)
        values = Values(
            step={
                "token_ids": at,
                "x": INPUTS["x"].tensor[first:last],
                "positions": at,
                "slot_mapping": table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE,
                "query_start": torch.tensor([0, last - first], dtype=torch.int32),
                "context_len": torch.tensor([last], dtype=torch.int32),
                "block_table": table[None].int(),
            },
            weights={},
            caches=caches,
        )
        outs.append(run(gm, values)[0])
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("rate", "top_k"), [(1, 0), (3, 0), (8, 0), (11, 0), (1, 3), (2, 2), (8, 2)]
)
def test_gives_the_same_numbers_paged(rate: int, top_k: int) -> None:
    want, _ = apply(model(rate, top_k), find_entries())
    assert ops(want)["llmc.entry_attention.default"] == 1
    found, _ = apply(want, paging())
    assert ops(found)["llmc.write_kv.default"] == ops(found)["llmc.paged_attention.default"] == 1
    assert ops(found).get("llmc.choose_keys.default", 0) == (top_k > 0)
    expected = run(want, Values.of(**INPUTS))[0]
    torch.testing.assert_close(paged(found, TOKENS), expected, rtol=1e-5, atol=1e-5)


def test_pieces_give_what_the_whole_gives() -> None:
    gm = model_without_sinks(rate=4, top_k=2)
    found, _ = apply(gm, find_entries(), paging())
    pieces = paged(found, 3, 4, 17, 18, 40, TOKENS)
    torch.testing.assert_close(pieces, paged(found, TOKENS), rtol=1e-5, atol=1e-5)


def model_without_sinks(rate: int, top_k: int) -> Any:
    gm = model(rate, top_k)
    for node in gm.graph.nodes:
        if node.target is attention.overload:
            node.args = (*node.args[:9], None, *node.args[10:])
    gm.recompile()
    return gm


def test_blocks_have_a_row_for_each_entry_that_can_end_in_them() -> None:
    for rate, rows in ((2, 4), (3, 3), (11, 1)):
        found, _ = apply(model(rate, 0), find_entries(), paging())
        caches = caches_of(found)
        assert caches[0, "key"].shape[1:] == (1, BLOCK_SIZE + rows, DIM)
        assert caches[0, "value"].numel() == 0
        assert roles(found, CacheInput)[0].tokens == BLOCK_SIZE


def test_an_index_that_chooses_all_is_left_out() -> None:
    all_of, _ = apply(model(4, 2), find_entries(), paging(max_positions=11))
    assert "llmc.choose_keys.default" not in ops(all_of)
    none, (_, report) = apply(model(12, 2), find_entries(), paging(max_positions=11))
    assert ops(none)["llmc.attention.default"] == 1 and len(report.notes) == 1


def test_changes_nothing_the_second_time() -> None:
    assert_idempotent(model(4, 2), find_entries())
    found, _ = apply(model(4, 2), find_entries())
    assert_idempotent(found, paging())


@pytest.mark.parametrize(
    ("gm", "options", "reason"),
    [
        (lambda: model(4, 0, window=0), {}, r"a window of 0 tokens \(0: all\)"),
        (lambda: model(4, 0, chunk=4), {}, "chunks or a position bias"),
        (lambda: model(3, 2), {}, "set block_size to a multiple of 3"),
        (lambda: model(4, 2), {"long_texts": True}, "different rotary frequencies"),
    ],
)
def test_refuses_what_it_does_not_know(gm: Any, options: Any, reason: str) -> None:
    with pytest.raises(CompileError, match=reason):
        apply(gm(), find_entries(), paging(**options))


def test_the_marker_shows_entries_from_their_last_token_on() -> None:
    """Alone, without sinks: a token with one entry in its reach and no window but itself."""
    q = torch.zeros(1, 1, 5, 2)
    k, entry = torch.zeros(1, 1, 5, 2), torch.arange(10.0).view(5, 2)
    empty = torch.empty(0)
    out = entry_attention.reference(
        q, k, entry, None, None, None, empty, empty, 1.0, 1, 0.0, None, 2, 0
    )
    want = torch.stack([torch.zeros(2), *[entry[1] / 2] * 2, *[(entry[1] + entry[3]) / 3] * 2])
    torch.testing.assert_close(out[0, :, 0], want)
