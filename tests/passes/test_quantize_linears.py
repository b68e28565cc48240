"""quantize_linears: weights of linears are held in 4 or 8 bits; heads, routers and ties are not."""

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
    ops,
    roles,
    run,
    step,
    trace,
    weight,
)
from torch import Tensor

from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_linear import FORMATS, Format, Quantization
from llmc.passes.inputs import WeightInput
from llmc.passes.merge_linears import merge_linears
from llmc.passes.quantize_linears import quantize_linears

GEN = torch.Generator().manual_seed(0)
X = step(torch.randn(1, 5, 64, generator=GEN), dynamic=1)


def made(name: str, *shape: int) -> Arg:
    return weight(name, torch.randn(*shape, generator=GEN) * 64**-0.5)


W, V, B = made("w", 48, 64), made("v", 16, 64), made("b", 48)


def low(gm: torch.fx.GraphModule) -> list[tuple[tuple[str, ...], str, str]]:
    """(parts, format, which tensor) of the quantized weights."""
    found = [r for r in roles(gm, WeightInput) if r.quantized]
    return [(r.parts, r.quantized.to.format, r.quantized.part) for r in found]


# of the largest output; the outputs are sums of 64 products with weights of 4 or 8 bits
TOLERANCE = {"int8": 0.01, "fp8": 0.04, "int4": 0.12}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("biased", [False, True])
def test_rewrites(format: Format, biased: bool) -> None:
    inputs = {"x": X, "w": W} | ({"b": B} if biased else {})

    def linear(x: Tensor, w: Tensor, *b: Tensor) -> Tensor:
        return F.linear(x, w, *b)

    gm = trace(linear, **inputs)
    quantized, (report,) = apply(gm, quantize_linears(format=format))
    assert report.removed == {"aten.linear.default": 1}
    assert report.added == {"llmc.quantized_linear.default": 1}
    assert sorted(low(quantized)) == [(("w",), format, "scale"), (("w",), format, "weight")]
    assert WeightInput(parts=("w",)) not in roles(quantized, WeightInput), "the plain one is freed"
    values = Values.of(**inputs)
    want = run(gm, values)
    error = float((run(quantized, values) - want).abs().max() / want.abs().max())
    assert 0 < error < TOLERANCE[format]
    assert_idempotent(gm, quantize_linears(format=format))


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_the_last_block_may_have_fewer_channels(format: Format) -> None:
    inputs = {"x": X, "w": made("odd", 20, 64), "b": made("bias", 20)}
    gm = trace(F.linear, **inputs)
    quantized, (report,) = apply(gm, quantize_linears(format=format))
    assert "llmc.quantized_linear.default" in report.added
    values = Values.of(**inputs)
    want, got = run(gm, values), run(quantized, values)
    assert got.shape == want.shape == (1, 5, 20)
    assert 0 < (got - want).abs().max() < TOLERANCE[format] * want.abs().max()
    assert_idempotent(gm, quantize_linears(format=format))


def test_merged_weights_are_quantized_merged_and_alike() -> None:
    """Parts that are no whole blocks too: the merged weight has some."""
    inputs = {"x": X, "w": W, "v": V, "u": made("u", 8, 64), "t": made("t", 24, 64)}

    def linears(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return [F.linear(x, w) for w in weights]

    gm, _ = apply(trace(linears, **inputs), merge_linears())
    quantized, _ = apply(gm, quantize_linears(format="int4"))
    assert low(quantized)[0][0] == ("w", "v", "u", "t")
    inputs = {"x": X, "w": W, "v": V}
    plain = trace(linears, **inputs)
    alone, _ = apply(plain, quantize_linears(format="int4"))
    merged, _ = apply(plain, merge_linears(), quantize_linears(format="int4"))
    assert_same(merged, alone, Values.of(**inputs))


def test_nothing_is_done_unless_asked() -> None:
    gm = trace(F.linear, x=X, w=W)
    same, (report,) = apply(gm, quantize_linears(format=None))
    assert ops(same) == ops(gm)
    assert report.notes == ("--quantization is not set",)


def test_stored_weights_keep_their_form() -> None:
    """Merged ones that have one form too; what is stored in full, or in two forms, stays plain."""
    inputs = {"x": X, "w": W, "v": V, "u": made("u", 32, 64), "t": made("t", 32, 64)}

    def linears(x: Tensor, w: Tensor, v: Tensor, u: Tensor, t: Tensor) -> list[Tensor]:
        y = x + 1
        return [F.linear(x, w), F.linear(x, v), F.linear(y, u), F.linear(y, t)]

    four = Quantization(format="int4", group=32, scale="float32", zero=True)
    eight = Quantization(format="int8")
    gm, _ = apply(trace(linears, **inputs), merge_linears())
    kept = (("w", four), ("v", four), ("u", four), ("t", eight))
    quantized, (report,) = apply(gm, quantize_linears(format=None, kept=kept))
    assert report.added == {"llmc.quantized_linear.default": 1}
    roles_of = [r for r in roles(quantized, WeightInput) if r.quantized]
    assert sorted(r.quantized.part for r in roles_of) == ["scale", "weight", "zero"]
    assert all(r.parts == ("w", "v") and r.quantized.kept for r in roles_of)
    assert "merged weights are stored in different formats" in report.notes[0]
    _, (report,) = apply(gm, quantize_linears(format=None, kept=(("u", four),)))
    assert report.notes[0].startswith("1 linears: stored unquantized")
    again, _ = apply(gm, quantize_linears(format="fp8", kept=kept))
    assert {f for _, f, _ in low(again)} == {"fp8"}, "a format that is asked for goes first"
    again, _ = apply(gm, quantize_linears(format="int4", kept=kept))
    assert {(r.parts, r.quantized.kept) for r in roles(again, WeightInput) if r.quantized} == {
        (("w", "v"), True),
        (("u", "t"), False),
    }


def test_stored_weights_that_other_ops_read_are_widened() -> None:
    def tied(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w) + w.sum()

    kept = (("w", Quantization(format="int8")),)
    _, (report,) = apply(trace(tied, x=X, w=W), quantize_linears(format=None, kept=kept))
    assert not report.added and "shared with another op" in report.notes[0]


def test_a_stored_embedding_keeps_its_bits_with_the_head_it_is_tied_to() -> None:
    def tied(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w) + F.embedding(torch.zeros(5, dtype=torch.int64), w).sum()

    kept = (("w", Quantization(format="int8", group=32)),)
    gm, (report,) = apply(trace(tied, x=X, w=W), quantize_linears(format=None, kept=kept))
    assert report.added == {
        "llmc.quantized_linear.default": 1,
        "llmc.quantized_embedding.default": 1,
    }
    kept = {r.quantized.part for r in roles(gm, WeightInput) if r.quantized}
    assert kept == {"weight", "scale"} and all(r.quantized for r in roles(gm, WeightInput))


def test_experts_must_be_whole_blocks() -> None:
    inputs = {"x": X, "w": made("w", 3, 20, 64), "expert": step(torch.tensor([2, 0, 2, 1, 0]))}

    def routed(x: Tensor, w: Tensor, expert: Tensor) -> Tensor:
        out: Tensor = expert_linear.overload(x[0], w, None, expert, False)
        return out

    note = left_alone(routed, **inputs)
    assert "20 channels of 64 inputs do not divide into blocks" in note


@pytest.mark.parametrize("transposed", [False, True])
def test_routed_experts(transposed: bool) -> None:
    stack = made("w", 3, 64, 48) if transposed else made("w", 3, 48, 64)
    inputs = {
        "x": step(torch.randn(5, 64, generator=GEN)),
        "w": stack,
        "expert": step(torch.tensor([2, 0, 2, 1, 0])),
    }

    def routed(x: Tensor, w: Tensor, expert: Tensor) -> Tensor:
        out: Tensor = expert_linear.overload(x, w, None, expert, transposed)
        return out

    gm = trace(routed, **inputs)
    quantized, (report,) = apply(gm, quantize_linears(format="int8"))
    assert report.removed == {"llmc.expert_linear.default": 1}
    assert report.added == {"llmc.quantized_expert_linear.default": 1}
    values = Values.of(**inputs)
    want = run(gm, values)
    error = float((run(quantized, values) - want).abs().max() / want.abs().max())
    assert 0 < error < TOLERANCE["int8"]
    assert_idempotent(gm, quantize_linears(format="int8"))
    kept = Quantization(format="mxfp4", group=32, scale="exponent", transposed=True)
    again, (report,) = apply(gm, quantize_linears(format=None, kept=(("w", kept),)))
    if transposed:
        assert all(r.quantized.kept for r in roles(again, WeightInput))
    else:
        assert not report.added and "stored in another layout" in report.notes[0]


def left_alone(fn: Any, **inputs: Arg) -> str:
    _, (report,) = apply(trace(fn, **inputs), quantize_linears(format="int4"))
    assert not report.added
    (note,) = report.notes
    return note


def test_leaves_alone_and_says_why() -> None:
    def tied(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w) + w.sum()

    def routed(x: Tensor, w: Tensor) -> Tensor:
        return torch.topk(F.linear(x, w).softmax(-1, dtype=torch.float32), 2).values

    assert "shared with another op" in left_alone(tied, x=X, w=W)
    assert left_alone(lambda x, w: F.linear(x, w * 2), x=X, w=W).endswith("the weight is computed")
    assert "it is a router" in left_alone(routed, x=X, w=W)
    odd = left_alone(F.linear, x=step(torch.ones(5, 80)), w=made("odd", 48, 80))
    assert "48 channels of 80 inputs do not divide into blocks" in odd
    empty = left_alone(F.linear, x=step(torch.zeros(5, 0)), w=made("empty", 48, 0))
    assert "48 channels of 0 inputs do not divide into blocks" in empty


def test_a_head_is_int8_in_every_format() -> None:
    inputs = {"x": X, "w": W, "v": V, "logits_index": step(torch.tensor([0, 3]))}

    def model(x: Tensor, w: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, w), F.linear(x.index_select(1, index), v)

    formats: tuple[Format, ...] = ("int4", "int8", "fp8")
    for format in formats:
        quantized, _ = apply(trace(model, **inputs), quantize_linears(format=format))
        found = {parts: kind for parts, kind, _ in low(quantized)}
        assert found == {("w",): format, ("v",): "int8"}


def test_an_embedding_has_the_bits_of_the_head_that_it_is_tied_to() -> None:
    ids, index = step(torch.tensor([1, 47, 0])), step(torch.tensor([0, 2]))
    inputs = {"ids": ids, "w": W, "logits_index": index}

    def tied(ids: Tensor, w: Tensor, index: Tensor) -> Tensor:
        return F.linear(F.embedding(ids, w)[None].index_select(1, index), w)

    def untied(ids: Tensor, w: Tensor) -> Tensor:
        return F.embedding(ids, w)

    formats: tuple[Format, ...] = ("int4", "int8", "fp8")
    for format in formats:
        gm = trace(tied, **inputs)
        quantized, (report,) = apply(gm, quantize_linears(format=format))
        assert report.added == {
            "llmc.quantized_linear.default": 1,
            "llmc.quantized_embedding.default": 1,
        }
        assert {kind for _, kind, _ in low(quantized)} == {"int8"}
        assert WeightInput(parts=("w",)) not in roles(quantized, WeightInput)
        values = Values.of(**inputs)
        want = run(gm, values)
        error = float((run(quantized, values) - want).abs().max() / want.abs().max())
        assert 0 < error < 2 * TOLERANCE["int8"]
    _, (report,) = apply(trace(untied, ids=ids, w=W), quantize_linears(format="int8"))
    assert not report.added
