"""find_linear_attention: linear attention in blocks becomes a scan, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_graphs import (
    Arg,
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
from torch import Tensor, fx

from llmc.compiler.branches import same_code
from llmc.passes.find_linear_attention import find_linear_attention, same_decays
from llmc.passes.inputs import ConstantInput

HEADS, DIM, V_DIM, BLOCK = 3, 4, 6, 4
SLOPES = torch.tensor([0.02, 0.4, 3.0])
WIDTHS = [DIM, DIM, V_DIM]
FIND = find_linear_attention()
Loop = Callable[..., Tensor]


def tables(slopes: Tensor) -> dict[str, Arg]:
    """Decays since the block before, to the block's end, and within the block."""
    place = torch.arange(BLOCK) + 1.0
    distance = place[:, None] - place[None, :]
    within = torch.exp(-slopes[:, None, None] * distance).tril()
    values = {
        "before": torch.exp(-slopes[:, None, None] * place[:, None]),
        "after": torch.exp(-slopes[:, None, None] * (BLOCK - place[:, None])),
        "within": within,
        "slope": slopes[:, None, None],
    }
    return {name: constant(value) for name, value in values.items()}


def inputs(tokens: int, slopes: Tensor = SLOPES) -> dict[str, Arg]:
    gen = torch.Generator().manual_seed(tokens)
    return {
        "positions": step(torch.arange(tokens)),
        "x": step(torch.randn(1, HEADS, tokens, sum(WIDTHS), generator=gen), dynamic=2),
        **tables(slopes),
    }


def loop(*, carried: float = 1.0, turned: bool = False) -> Loop:
    """As models write it; `carried` is what of the state goes from block to block."""

    def forward(
        positions: Tensor,
        x: Tensor,
        before: Tensor,
        after: Tensor,
        within: Tensor,
        slope: Tensor,
    ) -> Tensor:
        q, k, v = x.split(WIDTHS, -1)
        if turned:
            q, k = k, q
        state = torch.zeros(1, HEADS, DIM, V_DIM, dtype=v.dtype)
        outs = []
        tokens = x.shape[2]
        for i in range((tokens + BLOCK - 1) // BLOCK):
            size = min(i * BLOCK + BLOCK, tokens) - i * BLOCK
            q_b, k_b, v_b = (s[:, :, i * BLOCK : i * BLOCK + size] for s in (q, k, v))
            own = (q_b @ k_b.transpose(-1, -2) * within[:, :size, :size]) @ v_b
            outs.append((q_b * before[:, :size]) @ state + own)
            added = (k_b * after[:, -size:]).transpose(-1, -2) @ v_b
            state = carried * state * torch.exp(-slope * size) + added
        return torch.cat(outs, -2) + 0 * positions[:, None]

    return forward


def traced(tokens: int, slopes: Tensor = SLOPES, **changes: Any) -> fx.GraphModule:
    return trace(loop(**changes), **inputs(tokens, slopes))


@pytest.mark.parametrize("tokens", [3, 11])
def test_rewrites_and_gives_the_same_numbers(tokens: int) -> None:
    gm = traced(tokens)
    found, (report,) = apply(gm, FIND)
    assert ops(found)["llmc.selective_scan.default"] == 1
    assert not {"aten.matmul.default", "aten.cat.default", "aten.exp.default"} & set(ops(found))
    assert "3 heads" in report.notes[0]
    (decay,) = (r.tensor for r in roles(found, ConstantInput))
    torch.testing.assert_close(decay, -SLOPES[:, None])
    assert_same(found, gm, Values.of(**inputs(tokens)))


def test_one_block_and_several_are_the_same_code() -> None:
    (short, _), (long, _) = (apply(traced(tokens), FIND) for tokens in (3, 11))
    assert same_code(short.graph, long.graph, 11) and same_decays(short.graph, long.graph)
    values = Values.of(**inputs(11))
    torch.testing.assert_close(run(short, values), run(traced(11), values), rtol=1e-5, atol=1e-5)


def test_the_sequences_may_be_used_in_any_order() -> None:
    gm = traced(11, turned=True)
    found, _ = apply(gm, FIND)
    assert ops(found)["llmc.selective_scan.default"] == 1
    assert_same(found, gm, Values.of(**inputs(11)))


@pytest.mark.parametrize("carried", [0.0, 1.1])
def test_another_loop_is_left_alone_and_the_notes_say_so(carried: float) -> None:
    gm = traced(11, carried=carried)
    same, (report,) = apply(gm, FIND)
    assert ops(same) == ops(gm)
    assert "not linear attention" in report.notes[0]


def test_one_block_does_not_tell_what_is_carried_so_capture_compares_with_several() -> None:
    (short, _), (long, _) = (apply(traced(n, carried=0.0), FIND) for n in (3, 11))
    assert ops(short)["llmc.selective_scan.default"] == 1
    assert not same_code(short.graph, long.graph, 11)


def test_other_decays_are_told_apart() -> None:
    slow, fast = (apply(traced(3, n * SLOPES), FIND)[0] for n in (1, 2))
    assert same_code(slow.graph, fast.graph, 3) and not same_decays(slow.graph, fast.graph)


def test_changes_nothing_the_second_time() -> None:
    assert_idempotent(traced(11), FIND)
