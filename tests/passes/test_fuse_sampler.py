"""fuse_sampler: the ops of append_sampler become one, which draws the same tokens."""

from __future__ import annotations

import pytest
import torch
from sampler_graphs import ROWS, graph, inputs
from tiny_graphs import Values, apply, assert_idempotent, ops, run

from llmc.passes.append_sampler import append_sampler
from llmc.passes.fuse_sampler import fuse_sampler

FUSED = "llmc.sample_rows.default"
GONE = {"llmc.process_logits.default", "llmc.ban_words.default", "llmc.sample.default"}


@pytest.mark.parametrize("is_head", [False, True])
def test_one_op_draws_the_same_tokens(is_head: bool) -> None:
    plain, _ = apply(graph(), append_sampler(is_head=is_head))
    fused, (report,) = apply(plain, fuse_sampler())
    assert report.added == {FUSED: 1} and report.removed.keys() >= GONE
    assert not {"aten.index_select.default", "aten.to.dtype"} & ops(fused).keys()
    for seed in range(5):
        drawn = torch.arange(ROWS) + 100 * seed
        given = Values.of(**inputs(temperature=torch.ones(ROWS), seed=drawn))
        for want, got in zip(run(plain, given), run(fused, given), strict=True):
            assert torch.equal(want, got)
    assert_idempotent(plain, fuse_sampler())


def test_a_sampler_with_parameters_of_its_own_is_left_alone() -> None:
    plain, _ = apply(graph(), append_sampler())
    [token] = [n for n in plain.graph.nodes if str(n.target) == "llmc.sample.default"]
    table = next(a for a in token.args if "index_select" in str(getattr(a, "target", "")))
    with plain.graph.inserting_before(token):
        doubled = plain.graph.call_function(torch.ops.aten.mul.Scalar, (table, 2.0))
    doubled.meta["val"] = table.meta["val"]
    token.replace_input_with(table, doubled)
    left, _ = apply(plain, fuse_sampler())
    assert ops(left).keys() >= GONE
