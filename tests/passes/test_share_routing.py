"""share_routing: one sort for the experts' linears of a layer, and no copy of a row per choice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_graphs import Arg, Values, apply, assert_idempotent, assert_same, ops, step, trace, weight
from torch import Tensor

from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import quantization_of, quantize
from llmc.passes.share_routing import share_routing

GEN = torch.Generator().manual_seed(0)
TOKENS, CHOICES, WIDTH, EXPERTS = 5, 3, 32, 6
SORT = "llmc.sort_experts.default"


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GEN)


INPUTS: dict[str, Arg] = {
    "x": step(rand(TOKENS, WIDTH)),
    "index": step(torch.randint(-1, EXPERTS + 1, (TOKENS, CHOICES), generator=GEN)),
    "up": weight("up", rand(EXPERTS, WIDTH, WIDTH)),
    "down": weight("down", rand(EXPERTS, WIDTH, WIDTH)),
}
VALUES = Values.of(**INPUTS)
Rows = Callable[[Tensor], Tensor]


def repeated(x: Tensor) -> Tensor:
    return x.unsqueeze(1).expand(-1, CHOICES, -1).reshape(-1, WIDTH)


def layer(rows: Rows) -> Callable[..., Tensor]:
    def run(x: Tensor, index: Tensor, up: Tensor, down: Tensor) -> Tensor:
        expert = index.reshape(-1)
        y = expert_linear.overload(rows(x), up, None, expert, False)
        return expert_linear.overload(y.tanh(), down, None, expert, True)

    return run


def test_a_layer_sorts_once_and_reads_tokens_in_place() -> None:
    gm = trace(layer(repeated), **INPUTS)
    shared, (report,) = apply(gm, share_routing())
    assert report.added == {SORT: 1, "<built-in function getitem>": 2}
    assert set(report.removed) >= {"aten.unsqueeze.default", "aten.expand.default"}
    assert ops(shared)["aten.reshape.default"] == 1, "of the experts' numbers"
    orders = {node.args[5:] for node in shared.graph.nodes if "expert_linear" in str(node.target)}
    assert len(orders) == 1 and None not in orders.pop()
    assert_same(shared, gm, VALUES)
    assert_idempotent(gm, share_routing())


def test_quantized_experts_do_too() -> None:
    to = quantization_of("int8", WIDTH, WIDTH)
    assert to is not None
    words, scale = (
        part.unflatten(0, (EXPERTS, -1)).contiguous()
        for part in quantize(rand(EXPERTS * WIDTH, WIDTH), to)
    )
    given = {**INPUTS, "up": weight("up", words), "down": weight("down", scale)}

    def run(x: Tensor, index: Tensor, up: Tensor, down: Tensor) -> Tensor:
        expert, linear = index.reshape(-1), quantized_expert_linear.overload
        return linear(
            linear(repeated(x), up, down, None, None, expert), up, down, None, None, expert
        )

    gm = trace(run, **given)
    shared, _ = apply(gm, share_routing())
    assert ops(shared)[SORT] == 1 and "aten.expand.default" not in ops(shared)
    assert_same(shared, gm, Values.of(**given))


OTHER_ROWS: dict[str, Rows] = {
    "the tokens again and again": lambda x: x.unsqueeze(0).expand(3, -1, -1).reshape(-1, WIDTH),
    "other tokens": lambda x: torch.cat([x, x + 1, x + 2]),
    "parts of tokens": lambda x: x.unsqueeze(2).expand(-1, -1, CHOICES).reshape(-1, WIDTH),
}


@pytest.mark.parametrize("kind", OTHER_ROWS)
def test_other_rows_stay(kind: str) -> None:
    gm = trace(layer(OTHER_ROWS[kind]), **INPUTS)
    shared, (report,) = apply(gm, share_routing())
    assert not report.removed and ops(shared)[SORT] == 1
    assert_same(shared, gm, VALUES)


def test_one_linear_sorts_itself() -> None:
    def single(x: Tensor, index: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return expert_linear.overload(repeated(x), up, None, index.reshape(-1), False)

    gm = trace(single, **INPUTS)
    shared, _ = apply(gm, share_routing())
    assert SORT not in ops(shared) and "aten.expand.default" not in ops(shared)
    assert_same(shared, gm, VALUES)


def test_only_copies_are_left_out_where_linears_sort_themselves() -> None:
    gm = trace(layer(repeated), **INPUTS)
    shared, _ = apply(gm, share_routing(sorts=False))
    assert SORT not in ops(shared) and "aten.expand.default" not in ops(shared)
    assert_same(shared, gm, VALUES)
    assert_idempotent(gm, share_routing(sorts=False))
