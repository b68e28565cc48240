"""base and pipeline: switches, reports, order, docstrings, and what the runner promises."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import apply, ops, step, trace, weight
from torch import Tensor, fx

from llmc.errors import ConfigError
from llmc.kernels.write_kv import write_kv
from llmc.passes.base import Notes, graph_pass, run_passes
from llmc.passes.options import PipelineOptions
from llmc.passes.pipeline import pipeline

OPTIONS = PipelineOptions(block_size=16, max_positions=64, device_type="cpu")
PASSES = pipeline(OPTIONS)
REQUIRED = {
    "shard_linears",
    "insert_image_rows",
    "attend_whole_images",
    "canonicalize",
    "page_attention",
    "slot_state",
    "find_convolutions",
    "find_shifts",
    "find_positions",
    "find_attention",
    "find_entries",
    "find_indexers",
    "find_key_biases",
    "find_distance_biases",
    "find_linear_attention",
    "page_entries",
    "last_token_logits",
    "append_sampler",
}
X = step(torch.randn(1, 5, 8), dynamic=1)


@graph_pass()
def negate(gm: fx.GraphModule) -> Notes:
    """Negate the output.

    Before:
        return x
    After:
        return -x
    """
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        node = gm.graph.call_function(torch.ops.aten.neg.default, (output.args[0],))
    output.args = (node,)
    return ["a note"]


def test_every_pass_draws_before_and_after() -> None:
    for p in PASSES:
        assert "Before:" in p.doc and "After:" in p.doc, p.name


def test_a_pass_without_a_picture_is_refused() -> None:
    with pytest.raises(TypeError, match="needs a docstring with `Before:` and `After:`"):

        @graph_pass()
        def silent(gm: fx.GraphModule) -> Notes:
            """No picture."""
            return []


def test_names_are_unique_and_the_required_ones_are_marked() -> None:
    names = [p.name for p in PASSES]
    assert len(set(names)) == len(names)
    assert {p.name for p in PASSES if p.required} == REQUIRED


def test_the_order_that_passes_rely_on() -> None:
    names = [p.name for p in PASSES]
    assert names[0] == "canonicalize"
    for earlier, later in (
        ("last_token_logits", "append_sampler"),
        ("merge_linears", "fuse_act_mul"),
        ("share_rotary", "fuse_rope_write"),
        ("fuse_norms", "fuse_rope_write"),
        ("page_attention", "fuse_rope_write"),
        ("find_indexers", "page_attention"),
        ("find_entries", "page_entries"),
        ("page_entries", "page_attention"),
        ("find_key_biases", "page_attention"),
        ("find_linear_attention", "slot_state"),
    ):
        if later in names:
            assert names.index(earlier) < names.index(later), (earlier, later)


def test_an_unknown_pass_is_refused_with_the_known_names() -> None:
    gm = trace(lambda x: x * 2, x=X)
    with pytest.raises(ConfigError) as caught:
        run_passes(gm, PASSES, {"fuse_everything": False})
    assert str(caught.value).startswith("unknown pass 'fuse_everything'; the pipeline has ")
    for p in PASSES:
        assert p.name in str(caught.value)


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_a_required_pass_stays_on(name: str) -> None:
    gm = trace(lambda x: x * 2, x=X)
    with pytest.raises(ConfigError, match=f"pass '{name}' can't be switched off"):
        run_passes(gm, PASSES, {name: False})


def test_a_pass_is_switched_off_by_name() -> None:
    gm = trace(lambda x: x * 2, x=X)
    same, (report,) = run_passes(gm, (negate(),), {"negate": False})
    assert ops(same) == ops(gm)
    assert not report.enabled and str(report) == "negate: off"
    changed, (report,) = run_passes(gm, (negate(),), {"negate": True})
    assert ops(changed) == {"aten.mul.Tensor": 1, "aten.neg.default": 1}
    assert str(report) == "negate: -[] +[1 aten.neg.default]; a note"


def test_the_graph_that_is_given_stays_as_it_was() -> None:
    gm = trace(lambda x: x * 2, x=X)
    before = [str(n) for n in gm.graph.nodes]
    apply(gm, negate())
    assert [str(n) for n in gm.graph.nodes] == before


def test_dead_calls_and_inputs_go_but_writes_stay() -> None:
    """A cache write has no reader in the graph; dropping it would lose the request's past."""

    def writes(x: Tensor, w: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        F.linear(x, w)
        write_kv.overload(x.view(-1, 2, 4), x.view(-1, 2, 4), cache, cache.clone(), slots)
        return x + 1

    gm = trace(
        writes,
        x=X,
        w=weight("w", torch.randn(3, 8)),
        cache=step(torch.zeros(4, 2, 2, 4), dynamic=None),
        slots=step(torch.arange(5)),
    )
    clean, _ = apply(gm)
    assert [n.name for n in clean.graph.nodes if n.op == "placeholder"] == [
        "x_1",
        "cache_1",
        "slots_1",
    ]
    assert ops(clean)["llmc.write_kv.default"] == 1
    assert "aten.linear.default" not in ops(clean)
