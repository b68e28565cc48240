"""share_rotary: what depends on positions alone is read from a table."""

from __future__ import annotations

import torch
from tiny_graphs import (
    Values,
    apply,
    assert_idempotent,
    assert_same,
    constant,
    ops,
    roles,
    run,
    step,
    trace,
)
from tiny_layer import INPUTS, POSITIONS, layer
from torch import Tensor

from llmc.passes.inputs import ConstantInput
from llmc.passes.share_rotary import share_rotary

SHARE = share_rotary(max_positions=POSITIONS)


def test_rewrites_cos_and_sin() -> None:
    gm = layer()
    shared, (report,) = apply(gm, SHARE)
    assert report.added["aten.index_select.default"] == 2
    assert report.removed["aten.cos.default"] == report.removed["aten.sin.default"] == 1
    assert "aten.mul.Tensor" in report.removed  # the factor on cos went into the table too
    tables = [role.tensor for role in roles(shared, ConstantInput)]
    assert [tuple(t.shape) for t in tables] == [(POSITIONS, 8)] * 2
    assert_same(shared, gm, Values.of(**INPUTS), 0)
    assert_idempotent(gm, SHARE)


def test_halves_of_rows_of_a_buffer_that_are_repeated_for_pairs() -> None:
    """GPT-J's sines and cosines are one buffer, whose rows are then spread over the channels."""
    buffer = torch.randn(POSITIONS, 8)

    def scaled(positions: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
        sin, cos = torch.split(buffer[positions.unsqueeze(0)].to(x.dtype), 4, dim=-1)
        sin, cos = (torch.repeat_interleave(t[:, :, None, :], 2, 3) for t in (sin, cos))
        return x * cos + sin

    inputs = {
        "positions": step(torch.arange(3, 10)),
        "x": step(torch.randn(1, 7, 2, 8), dynamic=1),
        "buffer": constant(buffer),
    }
    gm = trace(scaled, **inputs)
    shared, (report,) = apply(gm, SHARE)
    assert not report.notes and "aten.repeat_interleave.self_int" not in ops(shared)
    assert_same(shared, gm, Values.of(**inputs), 0)
    assert_idempotent(gm, SHARE)


def test_frequencies_that_are_computed_in_every_step() -> None:
    def angles(positions: Tensor, x: Tensor) -> Tensor:
        frequency = 1.0 / (1e6 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8))
        return x * (positions.unsqueeze(0).unsqueeze(-1).float() * frequency).cos()

    inputs = {
        "positions": step(torch.arange(3, 10)), "x": step(torch.randn(1, 7, 4), dynamic=1),
    }  # fmt: skip
    gm = trace(angles, **inputs)
    shared, _ = apply(gm, SHARE)
    assert "aten.index_select.default" in ops(shared)
    assert not {"aten.pow.Scalar", "aten.arange.start_step", "aten.cos.default"} & set(ops(shared))
    assert_same(shared, gm, Values.of(**inputs), 0)


def test_the_last_position_is_in_the_table() -> None:
    gm = layer()
    shared, _ = apply(gm, SHARE)
    far = INPUTS | {"positions": step(torch.arange(POSITIONS - 7, POSITIONS))}
    assert_same(shared, gm, Values.of(**far), 0)


def test_leaves_alone_what_would_take_too_large_a_table() -> None:
    """A config may state any context; the engine serves what its memory holds."""
    gm = layer()
    shared, (report,) = apply(gm, share_rotary(max_positions=10**12))
    assert ops(shared) == ops(gm)
    assert any("set a smaller max_model_len" in note for note in report.notes)


def test_leaves_alone_values_that_mix_tokens() -> None:
    """Relative to the first token: no function of one position, so no table can hold it."""

    def relative(positions: Tensor) -> Tensor:
        p = positions.unsqueeze(0).unsqueeze(-1).float()
        return (p - p.select(1, 0).unsqueeze(1)).cos()

    gm = trace(relative, positions=step(torch.arange(3, 10)))
    shared, (report,) = apply(gm, SHARE)
    assert not report.added
    assert any("not functions of a single position" in note for note in report.notes)
    values = Values.of(positions=step(torch.arange(3, 10)))
    assert torch.equal(run(shared, values), run(gm, values))


def test_leaves_alone_what_reads_the_tokens_too() -> None:
    def scaled(positions: Tensor, x: Tensor) -> Tensor:
        return positions.unsqueeze(0).unsqueeze(-1) * x

    gm = trace(scaled, positions=step(torch.arange(7)), x=step(torch.randn(1, 7, 4), dynamic=1))
    shared, _ = apply(gm, SHARE)
    assert ops(shared) == ops(gm)


def test_a_model_that_reads_no_positions_is_left_alone() -> None:
    gm = trace(lambda token_ids: token_ids.unsqueeze(0) * 2, token_ids=INPUTS["token_ids"])
    _, (report,) = apply(gm, SHARE)
    assert report.notes == ("the model reads no positions",)
    assert not report.added and not report.removed


def test_integers_made_of_positions_are_left_alone() -> None:
    """Learned position embeddings look up positions themselves: a table gains nothing."""

    def offset(positions: Tensor) -> Tensor:
        return positions.unsqueeze(0) + 2

    gm = trace(offset, positions=step(torch.arange(7)))
    _, (report,) = apply(gm, SHARE)
    assert not report.added
    assert any("not one row of floats per token" in note for note in report.notes)
