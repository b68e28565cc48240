"""fuse_rope_write: norm, rotary and cache write of a layer become one op."""

from __future__ import annotations

import pytest
import torch
from tiny_graphs import Values, apply, assert_idempotent, ops, roles, run
from tiny_layer import (
    BLOCK_SIZE,
    DIM,
    HEADS,
    INPUTS,
    POSITIONS,
    complex_product,
    half_turn,
    layer,
    moved_neighbours,
    neighbours,
    paged_values,
    partial,
    partial_neighbours,
    two_halves,
)
from torch import Tensor, fx

from llmc.kernels.rms_norm import rms_norm
from llmc.kernels.rope_write import rope_write
from llmc.passes.edit import arguments, aten, calls, emit, set_arguments, val
from llmc.passes.fuse_norms import fuse_norms
from llmc.passes.fuse_rope_write import fuse_rope_write
from llmc.passes.inputs import ConstantInput
from llmc.passes.page_attention import page_attention
from llmc.passes.share_rotary import share_rotary


def before(gm: fx.GraphModule) -> fx.GraphModule:
    """What the pass meets: paged, with tables and norms."""
    passes = (
        page_attention(block_size=BLOCK_SIZE),
        share_rotary(max_positions=POSITIONS),
        fuse_norms(),
    )
    return apply(gm, *passes)[0]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "rotary",
    [
        half_turn,
        partial,
        two_halves,
        neighbours,
        partial_neighbours,
        moved_neighbours,
        complex_product,
    ],
)
def test_rewrites(rotary: object, normed: bool) -> None:
    is_partial = rotary in (partial, partial_neighbours)
    plain = layer(rotary, normed=normed, width=4 if is_partial else 8)
    gm = before(plain)
    fused, (report,) = apply(gm, fuse_rope_write())
    assert report.added == {"llmc.rope_write.default": 1}
    assert report.removed["llmc.write_kv.default"] == 1
    assert report.removed.get("llmc.rms_norm.default", 0) == (2 if normed else 0)
    assert not {"aten.polar.default", "aten.view_as_complex.default"} & set(ops(fused))
    assert not {"aten.mul.Tensor", "aten.cat.default", "llmc.rms_norm.default"} & set(ops(fused))
    want = run(plain, Values.of(**INPUTS))
    torch.testing.assert_close(run(fused, paged_values()), want, rtol=1e-5, atol=1e-5)
    assert_idempotent(gm, fuse_rope_write())


@pytest.mark.parametrize("at", ["transposed", "rotated", "together"])
@pytest.mark.parametrize("rotary", [half_turn, partial, two_halves, neighbours, complex_product])
def test_takes_a_norm_elsewhere(rotary: object, at: str) -> None:
    plain = layer(rotary, normed=True, width=4 if rotary is partial else 8, at=at)
    fused, _ = apply(before(plain), fuse_rope_write())
    (call,) = calls(fused.graph, rope_write.overload)
    assert arguments(call).norm_last == (at == "rotated")
    together = HEADS if at == "together" else 1
    assert val(arguments(call).query_norm).shape == (together * DIM,)
    assert not {name for name in ops(fused) if "rms_norm" in name}
    want = run(plain, Values.of(**INPUTS))
    torch.testing.assert_close(run(fused, paged_values()), want, rtol=1e-5, atol=1e-5)


def test_leaves_alone_a_norm_that_is_also_read_elsewhere() -> None:
    gm = before(layer(normed=True, at="together"))
    first = calls(gm.graph, rms_norm.overload)[0]
    output = gm.graph.output_node()
    output.args = ((output.args[0], first),)
    _, (report,) = apply(gm, fuse_rope_write())
    assert report.added == {"llmc.rope_write.default": 1}
    assert not report.removed.get("llmc.rms_norm.default")


def test_leaves_alone_a_norm_of_channels_that_were_moved() -> None:
    """Its weights would belong to other channels of what the op rotates."""
    gm = before(layer(moved_neighbours, normed=True, at="rotated"))
    _, (report,) = apply(gm, fuse_rope_write())
    assert not report.added
    assert "normalized after the rotation" in report.notes[0]


def test_the_cache_holds_the_same_as_without_the_pass() -> None:
    gm = before(layer(normed=True))
    fused, _ = apply(gm, fuse_rope_write())
    plain_values, fused_values = paged_values(poison=0.0), paged_values(poison=0.0)
    run(gm, plain_values)
    run(fused, fused_values)
    assert plain_values.caches is not None and fused_values.caches is not None
    for key, want in plain_values.caches.items():
        assert want.abs().sum() > 0
        torch.testing.assert_close(fused_values.caches[key], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rotary", [half_turn, two_halves])
def test_no_two_inputs_share_memory(rotary: object) -> None:
    """A table in the op's own form is read itself, beside readers that are not fused."""
    gm = before(layer(rotary))
    output = gm.graph.output_node()
    output.args = ((output.args[0], *calls(gm.graph, aten.index_select.default)),)
    fused, (report,) = apply(gm, fuse_rope_write())
    assert report.added == {"llmc.rope_write.default": 1}
    tables = [role.tensor for role in roles(fused, ConstantInput)]
    assert len(tables) == (4 if rotary is two_halves else 2)
    assert len({t.untyped_storage().data_ptr() for t in tables}) == len(tables)


def _cast_whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return neighbours(x.double(), cos, sin).to(x.dtype)


def _cast_terms(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x.double() * cos.unsqueeze(1) + turned.double() * sin.unsqueeze(1)).to(x.dtype)


def _cast_between_transposes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As a model that rotates before it transposes the heads to the front."""
    y = x.transpose(1, 2).contiguous().double()
    turned = torch.cat((-y[..., 4:], y[..., :4]), dim=-1)
    return (y * cos.unsqueeze(2) + turned * sin.unsqueeze(2)).transpose(1, 2).to(x.dtype)


@pytest.mark.parametrize("rotary", [_cast_whole, _cast_terms, _cast_between_transposes])
def test_sees_through_casts(rotary: object) -> None:
    """Some models rotate in a wider dtype; the op does so anyway."""
    plain = layer(rotary)
    fused, (report,) = apply(before(plain), fuse_rope_write())
    assert report.added == {"llmc.rope_write.default": 1}
    want = run(plain, Values.of(**INPUTS))
    torch.testing.assert_close(run(fused, paged_values()), want, rtol=1e-5, atol=1e-5)


def _unlike(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return half_turn(x, cos, sin) * 2


def _wrong_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((x[..., 1::2], -x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


@pytest.mark.parametrize("rotary", [_wrong_neighbours, _unlike])
def test_leaves_alone_and_says_why(rotary: object) -> None:
    plain = layer(rotary)
    gm = before(plain)
    left, (report,) = apply(gm, fuse_rope_write())
    assert not report.added and not report.removed
    (note,) = report.notes
    assert note.endswith("no rotary embedding of a known form")
    want = run(plain, Values.of(**INPUTS))
    torch.testing.assert_close(run(left, paged_values()), want, rtol=1e-5, atol=1e-5)


def test_leaves_alone_a_turn_the_other_way() -> None:
    """-sin for sin is another rotation; taking it for the usual one would be silent garbage."""

    def reverse(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((x[..., half:], -x[..., :half]), dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    plain = layer(reverse)
    left, (report,) = apply(before(plain), fuse_rope_write())
    assert not report.added
    want = run(plain, Values.of(**INPUTS))
    torch.testing.assert_close(run(left, paged_values()), want, rtol=1e-5, atol=1e-5)


def test_leaves_alone_rows_of_other_positions() -> None:
    """The op reads its tables by the tokens' own positions."""
    gm = before(layer())
    for rows in calls(gm.graph, aten.index_select.default):
        given = arguments(rows)
        with gm.graph.inserting_before(rows):
            half = emit(gm.graph, aten.floor_divide.Scalar, given.index, 2)
        set_arguments(rows, index=half)
    gm.recompile()
    left, (report,) = apply(gm, fuse_rope_write())
    assert not report.added
    want = run(gm, paged_values())
    torch.testing.assert_close(run(left, paged_values()), want, rtol=1e-5, atol=1e-5)
