"""round_activations: linears of integer weights take inputs in 16 bits, or in 8; of fp8 in fp8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Values, apply, assert_idempotent, run, step, trace, weight
from torch import Tensor

from llmc.kernels.quantized_linear import Format, Quantization
from llmc.passes.quantize_linears import quantize_linears
from llmc.passes.round_activations import round_activations

GEN = torch.Generator().manual_seed(0)
INPUTS = {
    "x": step(torch.randn(1, 5, 64, generator=GEN), dynamic=1),
    "w": weight("w", torch.randn(48, 64, generator=GEN) * 64**-0.5),
}


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def bits_of(gm: torch.fx.GraphModule) -> list[Any]:
    nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.llmc.quantized_linear.default)
    return [node.kwargs.get("x_bits") for node in nodes]


@pytest.mark.parametrize(
    ("format", "asked", "given"),
    [("int4", 8, 8), ("int4", 16, 16), ("int8", 8, 16), ("int8", 16, 16), ("fp8", 8, None)],
)
def test_rewrites(format: Format, asked: int, given: int | None) -> None:
    gm = trace(linear, **INPUTS)
    exact, _ = apply(gm, quantize_linears(format=format))
    rounded, (report,) = apply(exact, round_activations(bits=asked))
    assert bits_of(rounded) == [given]
    assert report.changed == (given is not None)
    values = Values.of(**INPUTS)
    want, have = run(exact, values), run(rounded, values)
    error = float((have - want).norm() / want.norm())
    if given is None:
        assert error == 0 and list(report.notes) == ["1 linears: inputs in fp8 are not requested"]
    else:
        assert 0 < error < (1e-2 if given == 8 else 5e-5)
    assert_idempotent(exact, round_activations(bits=asked))


def test_nothing_is_done_where_nothing_is_quicker() -> None:
    exact, _ = apply(trace(linear, **INPUTS), quantize_linears(format="int4"))
    same, (report,) = apply(exact, round_activations(bits=None))
    assert bits_of(same) == [None] and not report.changed and report.notes


def test_inputs_of_fp8_weights_become_fp8_on_request() -> None:
    exact, _ = apply(trace(linear, **INPUTS), quantize_linears(format="fp8"))
    rounded, (report,) = apply(exact, round_activations(bits=None, float8=True))
    assert bits_of(rounded) == [8] and report.changed and not report.notes
    values = Values.of(**INPUTS)
    want, have = run(exact, values), run(rounded, values)
    assert 0.01 < float((have - want).norm() / want.norm()) < 0.05
    assert_idempotent(exact, round_activations(bits=None, float8=True))


def test_integer_weights_are_left_alone_where_only_fp8_is_rounded() -> None:
    exact, _ = apply(trace(linear, **INPUTS), quantize_linears(format="int4"))
    same, (report,) = apply(exact, round_activations(bits=None, float8=True))
    assert bits_of(same) == [None] and not report.changed
    assert list(report.notes) == ["1 linears: integer products would not be faster here"]


def test_the_output_head_keeps_its_inputs() -> None:
    def head(x: Tensor, logits_index: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.index_select(1, logits_index), w)

    index = step(torch.tensor([1, 4]))
    gm = trace(head, x=INPUTS["x"], logits_index=index, w=INPUTS["w"])
    stored = (("w", Quantization(format="fp8")),)
    exact, _ = apply(gm, quantize_linears(format=None, kept=stored))
    same, (report,) = apply(exact, round_activations(bits=None, float8=True))
    assert bits_of(same) == [None]
    assert list(report.notes) == ["1 linears: it is the output head"]
