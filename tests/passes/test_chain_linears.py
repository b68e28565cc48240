"""chain_linears: the linears from one attention to the next in one op, where nothing comes
between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Arg, Values, apply, assert_idempotent, assert_same, ops, step, trace, weight
from torch import Tensor

from llmc.kernels.act_mul import act_mul
from llmc.kernels.rms_norm import rms_norm
from llmc.passes.base import run_passes
from llmc.passes.chain_linears import chain_linears
from llmc.passes.fuse_linears import fuse_linears

GEN = torch.Generator().manual_seed(0)
CHAIN = "llmc.chain_linears.default"
FUSED = "llmc.fused_linear.default"
ADDED = "llmc.add_linear.default"


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GEN) * 0.3


INPUTS: dict[str, Arg] = {
    "x": step(rand(1, 5, 16), dynamic=1),
    "qkv": weight("qkv", rand(24, 16)),
    "out": weight("out", rand(16, 24)),
    "up": weight("up", rand(40, 16)),
    "down": weight("down", rand(16, 20)),
    "gain": weight("gain", rand(16)),
    "bias": weight("bias", rand(40)),
}
VALUES = Values.of(**INPUTS)
# (hidden state, list of further results) -> the hidden state that is read from then on
Change = Callable[[Tensor, list[Tensor]], Tensor]


def same(h: Tensor, results: list[Tensor]) -> Tensor:
    return h


def model(before_mlp: Change = same, after_mlp: Change = same) -> Callable[..., list[Tensor]]:
    """Three layers whose attention is a sine; the second one is changed."""

    def run(
        x: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor, gain: Tensor, bias: Tensor
    ) -> list[Tensor]:
        h, results = x * 2, list[Tensor]()
        for layer in range(3):
            made = F.linear(rms_norm.overload(h, gain, 1e-6, float(layer)), qkv)
            h = h + F.linear(made.sin(), out)
            h = before_mlp(h, results) if layer == 1 else h
            made = F.linear(rms_norm.overload(h, gain, 1e-5, 0.5), up, bias)
            h = h + F.linear(act_mul.overload(made, "silu"), down)
            h = after_mlp(h, results) if layer == 1 else h
        return [rms_norm.overload(h, gain, 1e-5, 0.0), *results]

    return run


def test_chains_all_layers_but_the_last() -> None:
    gm = trace(model(), **INPUTS)
    fused, _ = apply(gm, fuse_linears())
    assert (ops(fused)[ADDED], ops(fused)[FUSED]) == (6, 6)
    chained, (report,) = apply(fused, chain_linears())
    assert report.removed == {ADDED: 4, FUSED: 4} and report.added == {CHAIN: 2}
    assert report.notes == (
        "add_linear_default_4: its layer's result is read by other ops than a linear",
    )
    assert_same(chained, gm, VALUES)
    assert_idempotent(fused, chain_linears())


def test_is_off_unless_asked_for() -> None:
    fused, _ = apply(trace(model(), **INPUTS), fuse_linears())
    left, (report,) = run_passes(fused, (chain_linears(),))
    assert not report.enabled and ops(left) == ops(fused)


def test_rests_where_it_is_unwanted() -> None:
    fused, _ = apply(trace(model(), **INPUTS), fuse_linears())
    _, (report,) = apply(fused, chain_linears(unwanted="no GPU"))
    assert not report.added and report.notes == ("no GPU",)


def summed(h: Tensor, results: list[Tensor]) -> Tensor:
    results.append(h.sum(-1))
    return h


def sliced(h: Tensor, results: list[Tensor]) -> Tensor:
    results.append(h[:, :, 3:].sum(-1))
    return h


OBSTACLES: dict[str, dict[str, Change]] = {
    "read before the norm": {"before_mlp": summed},
    "a view read after the layer": {"after_mlp": sliced},
    "scaled": {"after_mlp": lambda h, results: h * 3},
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_leaves_alone_a_layer_whose_result_is_read_in_between(name: str) -> None:
    gm = trace(model(**OBSTACLES[name]), **INPUTS)
    chained, (_, report) = apply(gm, fuse_linears(), chain_linears())
    assert report.added == {CHAIN: 1}
    notes = [note for note in report.notes if note.endswith("by other ops than a linear")]
    assert len(notes) == 1 + (name != "read before the norm")  # the last layer's is always there
    assert_same(chained, gm, VALUES)


def test_leaves_alone_linears_with_a_write_in_between() -> None:
    fused, _ = apply(trace(model(), **INPUTS), fuse_linears())
    first = next(n for n in fused.graph.nodes if str(n.target) == ADDED)
    source = first.args[1]
    with fused.graph.inserting_after(first):
        written = fused.graph.call_function(torch.ops.aten.neg_.default, (source,))
    written.meta["val"] = source.meta["val"]
    chained, (report,) = apply(fused, chain_linears())
    assert report.added == {CHAIN: 1}
    assert any("another op writes in between" in note for note in report.notes)
    assert_same(chained, fused, VALUES)
