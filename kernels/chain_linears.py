"""`chain_linears`: the linears between the attention of one layer and that of the next."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.fused_linear import add_linear, fused_linear
from llmc.kernels.registry import Case, op


def _shape(*, hidden: Tensor, next_weight: Tensor, **others: object) -> Tensor:
    return hidden.new_empty(*hidden.shape[:-1], next_weight.shape[0])


@op(mutates=("hidden",), shape=_shape)
def chain_linears(
    hidden: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    up_norm: Tensor | None,
    up_eps: float,
    up_offset: float,
    act: str,
    down_weight: Tensor,
    down_bias: Tensor | None,
    next_weight: Tensor,
    next_bias: Tensor | None,
    next_norm: Tensor | None,
    next_eps: float,
    next_offset: float,
) -> Tensor:
    """Four linears, each of which reads what the one before it computed:

        hidden += x weight^T + bias
        inner = act_mul(rms_norm(hidden) up_weight^T + up_bias)
        hidden += inner down_weight^T + down_bias
        return rms_norm(hidden) next_weight^T + next_bias

    hidden [..., C], updated in place, shares no memory with the other arguments. x [..., K],
    weight [C, K], up_weight [2 F, C] with the gates first, down_weight [C, F], next_weight [N, C];
    a bias has one number per row of its weight. act as in `act_mul`; norm [C], eps and offset as in
    `rms_norm`. All of one dtype, to which inner and hidden are rounded as by the single ops.

    Returns [..., N].
    """
    add_linear.reference(hidden, x, weight, bias, None, None, 0.0, None)
    inner = fused_linear.reference(
        hidden, up_weight, up_bias, up_norm, up_eps, up_offset, act, None
    )
    add_linear.reference(hidden, inner, down_weight, down_bias, None, None, 0.0, None)
    result: Tensor = fused_linear.reference(
        hidden, next_weight, next_bias, next_norm, next_eps, next_offset, None, None
    )
    return result


@chain_linears.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(device, dtype)

    for rows, width, depth, inner, channels, biased, act in (
        ((1,), 64, 48, 96, 80, False, "silu"),
        ((1, 1), 100, 34, 70, 33, True, "gelu"),
        ((1, 3), 72, 40, 24, 40, False, "gelu_tanh"),
        ((8,), 64, 256, 100, 96, True, "silu"),
        ((20,), 64, 32, 32, 48, True, "silu"),
    ):
        sizes = (width, depth), (2 * inner, width), (width, inner), (channels, width)
        weights = [rand(n, k) * 0.5 * k**-0.5 for n, k in sizes]
        biases = [rand(n) * 0.5 if biased else None for n, _ in sizes]
        norms = [None if width == 72 else 1 + 0.1 * rand(width) for _ in range(2)]
        hidden, x = rand(*rows, width), rand(*rows, depth)
        yield (
            hidden, x, weights[0], biases[0], weights[1], biases[1], norms[0], 1e-5, 0.0, act,
            weights[2], biases[2], weights[3], biases[3], norms[1], 1e-6, float(width == 100),
        )  # fmt: skip
