"""fuse_experts: the activation between the linears of routed experts becomes part of the first."""

from __future__ import annotations

import torch
from tiny_graphs import Arg, Values, apply, assert_idempotent, assert_same, ops, step, trace, weight
from torch import Tensor

from llmc.kernels.act_mul import act_mul
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import quantization_of, quantize
from llmc.passes.fuse_experts import fuse_experts

GEN = torch.Generator().manual_seed(0)
TOKENS, CHOICES, WIDTH, EXPERTS = 5, 3, 32, 6


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GEN)


INPUTS: dict[str, Arg] = {
    "x": step(rand(TOKENS, WIDTH)),
    "index": step(torch.randint(-1, EXPERTS + 1, (TOKENS * CHOICES,), generator=GEN)),
    "up": weight("up", rand(EXPERTS, 2 * WIDTH, WIDTH)),
    "down": weight("down", rand(EXPERTS, WIDTH, WIDTH)),
}
VALUES = Values.of(**INPUTS)


def experts(x: Tensor, index: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = act_mul.overload(expert_linear.overload(x, up, None, index, False), "gelu_tanh")
    return expert_linear.overload(y, down, None, index, False)


def test_the_first_linear_takes_the_activation() -> None:
    gm = trace(experts, **INPUTS)
    fused, (report,) = apply(gm, fuse_experts())
    assert report.removed == {"llmc.act_mul.default": 1} and not report.added
    assert ops(fused) == {"llmc.expert_linear.default": 2}
    assert_same(fused, gm, VALUES)
    assert_idempotent(gm, fuse_experts())


def test_quantized_experts_do_too() -> None:
    to = quantization_of("int8", 2 * WIDTH, WIDTH)
    assert to is not None
    words, scale = (
        part.unflatten(0, (EXPERTS, -1)).contiguous()
        for part in quantize(rand(EXPERTS * 2 * WIDTH, WIDTH), to)
    )
    given = {**INPUTS, "up": weight("up", words), "down": weight("down", scale)}

    def run(x: Tensor, index: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = quantized_expert_linear.overload(x, up, down, None, None, index)
        return act_mul.overload(y, "silu")

    gm = trace(run, **given)
    fused, _ = apply(gm, fuse_experts())
    assert ops(fused) == {"llmc.quantized_expert_linear.default": 1}
    assert_same(fused, gm, Values.of(**given))


def test_a_linear_that_is_read_elsewhere_keeps_its_result() -> None:
    def read_twice(x: Tensor, index: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
        y = expert_linear.overload(x, up, None, index, False)
        return [act_mul.overload(y, "silu"), y]

    gm = trace(read_twice, **INPUTS)
    same, (report,) = apply(gm, fuse_experts())
    assert not report.changed and ops(same) == ops(gm)


def test_rests_where_it_is_unwanted() -> None:
    _, (report,) = apply(trace(experts, **INPUTS), fuse_experts(unwanted="no GPU"))
    assert not report.changed and report.notes == ("no GPU",)
