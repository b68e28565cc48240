"""insert_image_rows and attend_whole_images, on the step of a model that reads images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_graphs import Values, apply, cache, run, step, trace
from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.kernels.image_attention import image_attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.place_rows import place_rows
from llmc.passes.attend_whole_images import attend_whole_images
from llmc.passes.edit import calls
from llmc.passes.inputs import StepInput, input_of
from llmc.passes.insert_image_rows import insert_image_rows

TAKE = insert_image_rows()
TOKENS, WIDTH = 5, 8


def marked() -> fx.GraphModule:
    def model(token_ids: Tensor) -> Tensor:
        embeddings = token_ids[None, :, None].float() * torch.arange(1.0, 1 + WIDTH)
        start = place_rows.overload(embeddings, None, None, 0)
        return start * 2 + place_rows.overload(torch.zeros_like(start), None, None, 1)

    return trace(model, token_ids=step(torch.arange(TOKENS)))


def test_rows_of_both_levels_are_read_from_one_input() -> None:
    gm, [report] = apply(marked(), TAKE)
    assert report.changed
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    rows = next(n for n in inputs if input_of(n) == StepInput(name="image_rows"))
    assert tuple(rows.meta["val"].shape) == (2, 2 * WIDTH)
    values = {
        "token_ids": torch.tensor([7, 1, 1, 4, 1]),
        "image_rows": torch.randn(3, 2 * WIDTH),
        "image_row": torch.tensor([-1, 2, 0, -1, 2]),
    }
    want = values["token_ids"][None, :, None] * torch.arange(1.0, 1 + WIDTH) * 2
    for token, row in ((1, 2), (2, 0), (4, 2)):
        first, second = values["image_rows"][row].chunk(2)
        want[0, token] = first * 2 + second
    torch.testing.assert_close(run(gm, Values(step=values, weights={})), want)
    again, [second_report] = apply(gm, TAKE)
    assert not second_report.changed
    assert len(list(calls(again.graph, place_rows.overload))) == 2


def test_a_model_that_reads_no_images_is_left_alone() -> None:
    gm = trace(lambda x: x * 2, x=step(torch.randn(1, TOKENS, WIDTH), dynamic=1))
    _, [report] = apply(gm, TAKE)
    assert not report.changed


def two_layers(*, token_sinks: bool = False) -> fx.GraphModule:
    def model(
        positions: Tensor,
        x: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        block_table: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        where = (query_start, context_len, block_table, 0.5)
        one = paged_attention.overload(x, key, value, *where, 0, 0, 0.0, None, None)
        sinks = x[..., 0] if token_sinks else None
        two = paged_attention.overload(one, key, value, *where, 3, 0, 0.0, sinks, None)
        return one + two + positions[:, None, None]

    filled = torch.randn(2, 2, 4, WIDTH)
    caches: dict[str, Any] = {
        part: type(empty)(tensor=filled, role=empty.role)
        for part in ("key", "value")
        for empty in [cache(0, part)]
    }
    return trace(
        model,
        positions=step(torch.arange(TOKENS)),
        x=step(torch.randn(TOKENS, 2, WIDTH)),
        query_start=step(torch.tensor([0, TOKENS], dtype=torch.int32), dynamic=None),
        context_len=step(torch.tensor([TOKENS], dtype=torch.int32), dynamic=None),
        block_table=step(torch.tensor([[1, 0]], dtype=torch.int32), dynamic=None),
        **caches,
    )


def test_layers_that_see_whole_images() -> None:
    for where, count in (("none", 0), ("all", 2), ("windowed", 1)):
        gm, [report] = apply(two_layers(), attend_whole_images(where=where))
        seen = list(calls(gm.graph, image_attention.overload))
        assert len(seen) == count and report.changed == bool(count)
        assert len(list(calls(gm.graph, paged_attention.overload))) == 2
        assert all(node.users for node in seen)
        again, [second] = apply(gm, attend_whole_images(where=where))
        assert not second.changed
        assert len(list(calls(again.graph, image_attention.overload))) == count


def test_sinks_of_tokens_are_refused_beside_whole_images() -> None:
    with pytest.raises(CompileError, match="per-token sinks, with which"):
        apply(two_layers(token_sinks=True), attend_whole_images(where="all"))
