"""find_activations: GELU and SiLU in any spelling become torch's op; what differs stays."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tiny_graphs import (
    Values,
    apply,
    assert_idempotent,
    assert_same,
    constant,
    ops,
    step,
    trace,
    weight,
)
from torch import Tensor
from transformers.activations import ACT2FN

from llmc.passes.find_activations import find_activations
from llmc.passes.fuse_act_mul import fuse_act_mul

GENERATOR = torch.Generator().manual_seed(0)
X = step(torch.randn(1, 5, 16, generator=GENERATOR) * 3, dynamic=1)
Y = step(torch.randn(1, 5, 16, generator=GENERATOR), dynamic=1)
GELU, SILU = "aten.gelu.default", "aten.silu.default"


def tanh_of_product(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def in_float32(x: Tensor) -> Tensor:
    wide = x.float()
    return (0.5 * wide * (1.0 + torch.erf(wide / math.sqrt(2.0)))).to(x.dtype)


@pytest.mark.parametrize(
    "spelled,op",
    [
        *((ACT2FN[name], GELU) for name in ("gelu_new", "gelu_fast", "gelu_accurate")),
        (ACT2FN["gelu_python_tanh"], GELU),
        (ACT2FN["gelu_python"], GELU),
        (tanh_of_product, GELU),
        (lambda x: x * torch.sigmoid(x), SILU),
    ],
)
def test_a_spelled_activation_becomes_one_op(spelled: Callable[[Tensor], Tensor], op: str) -> None:
    gm = trace(lambda x: spelled(x) + 1, x=X)
    found, (report,) = apply(gm, find_activations())
    assert report.added == {op: 1}
    assert len(ops(found)) == 2
    assert_same(found, gm, Values.of(x=X), 1e-6)
    assert_idempotent(gm, find_activations())


def test_a_factor_may_be_a_tensor_of_one_number() -> None:
    def spelled(x: Tensor, factor: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(factor) * (x + 0.044715 * torch.pow(x, 3))))

    gm = trace(spelled, x=X, factor=constant(torch.tensor(2 / math.pi)))
    assert ops(apply(gm, find_activations())[0]) == {GELU: 1}


def test_computed_in_a_wider_dtype() -> None:
    x = step(torch.randn(1, 5, 16, generator=GENERATOR).bfloat16(), dynamic=1)
    found, _ = apply(trace(in_float32, x=x), find_activations())
    assert ops(found) == {GELU: 1}


def test_the_argument_may_be_arithmetic_itself() -> None:
    gm = trace(lambda x, y: ACT2FN["gelu_new"](x + y * 2.0), x=X, y=Y)
    found, (report,) = apply(gm, find_activations())
    assert report.added == {GELU: 1}
    assert ops(found) == {"aten.mul.Tensor": 1, "aten.add.Tensor": 1, GELU: 1}
    assert_same(found, gm, Values.of(x=X, y=Y), 1e-6)


def test_a_gate_that_is_spelled_out_is_fused() -> None:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return ACT2FN["gelu_new"](gate) * up

    gm = trace(gated, x=X)
    fused, _ = apply(gm, find_activations(), fuse_act_mul())
    assert ops(fused) == {"llmc.act_mul.default": 1}
    assert_same(fused, gm, Values.of(x=X), 1e-6)


CHANNELS = weight("w", torch.rand(16, generator=GENERATOR))


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y, w: x * torch.sigmoid(1.702 * x),  # which act_mul has
        lambda x, y, w: 30 * torch.tanh(x / 30),
        lambda x, y, w: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3)))),
        lambda x, y, w: y * torch.sigmoid(x),
        lambda x, y, w: x * torch.sigmoid(w * x),
        lambda x, y, w: x * torch.tanh(x).sum(),
        lambda x, y, w: x * torch.sigmoid(x * x.shape[1]),
    ],
)
def test_other_functions_stay(other: Callable[..., Tensor]) -> None:
    gm = trace(other, x=X, y=Y, w=CHANNELS)
    assert ops(apply(gm, find_activations())[0]) == ops(gm)
