"""Normalization by mean and variance over the last dimension, alone or of a residual sum:
`layer_norm` and `add_layer_norm`.

LayerNorm: Ba, Kiros and Hinton, 2016, https://arxiv.org/abs/1607.06450.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.registry import Case, op


@op(shape="x")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., N], weight, bias [N] -> (x - mean) / sqrt(variance + eps) * weight + bias [..., N].

    Computed in float32 and rounded once, to x's dtype.
    """
    scale, shift = (None if t is None else t.float() for t in (weight, bias))
    y = F.layer_norm(x.float(), x.shape[-1:], scale, shift, eps)
    return y.to(x.dtype).contiguous()


def _shape(*, x: Tensor, **others: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@op(shape=_shape)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x, residual [..., N] -> (layer_norm(x + residual), x + residual), both in x's dtype.

    The sum is rounded to x's dtype before it is normalized, as the unfused graph does.
    """
    total = (x + residual).contiguous()
    return layer_norm.reference(total, weight, bias, eps), total


@layer_norm.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for shape in ((1, 1, 64), (1, 3, 2, 100), (5, 1024), (2, 7)):
        x, weight, bias = (
            torch.randn(*size, generator=gen).to(device, dtype)
            for size in (shape, shape[-1:], shape[-1:])
        )
        yield x + 2, weight, bias, 1e-5
    yield x, weight, None, 1e-6
    yield x, None, None, 1e-6


@add_layer_norm.cases
def _add_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for x, *rest in _cases(device, dtype):
        yield x, x.flip(-1) / 2 - 1, *rest
