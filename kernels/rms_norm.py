"""Root-mean-square normalization, alone or around a residual sum: `rms_norm`, `add_rms_norm` (sum
first), `norm_add` (norm first) and `norm_add_norm` (both).

RMSNorm: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


def normalize(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in float32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight.float() + offset)


@op(shape="x")
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """x [..., N], weight [N] -> [..., N] in x's dtype; computed in float32 and rounded once.

    offset is added to the weight: 0, or 1 for models that store the weight minus one.
    """
    return normalize(x, weight, eps, offset).to(x.dtype).contiguous()


def _shape(*, x: Tensor, **others: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@op(shape=_shape)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """x, residual [..., N] -> (rms_norm(x + residual), x + residual), both in x's dtype.

    The sum is rounded to x's dtype before it is normalized, as the unfused graph does.
    """
    total = (x + residual).contiguous()
    return normalize(total, weight, eps, offset).to(x.dtype), total


@op(shape="x")
def norm_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> Tensor:
    """x, residual [..., N] -> residual + rms_norm(x), in x's dtype.

    Both the norm and the sum are rounded to x's dtype, as the unfused graph does.
    """
    return (normalize(x, weight, eps, offset).to(x.dtype) + residual).contiguous()


@op(shape=_shape)
def norm_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    next_weight: Tensor | None,
    next_eps: float,
    next_offset: float,
) -> tuple[Tensor, Tensor]:
    """x, residual [..., N] -> (the next rms_norm of the sum, residual + rms_norm(x)).

    `add_rms_norm` of a normalized x, for models with a norm on both sides of a residual sum. Each
    step is rounded to x's dtype.
    """
    total = norm_add.reference(x, residual, weight, eps, offset)
    return normalize(total, next_weight, next_eps, next_offset).to(x.dtype), total


@rms_norm.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for shape in ((1, 1, 64), (1, 3, 2, 100), (5, 1024)):
        x = torch.randn(*shape, generator=gen).to(device, dtype)
        yield x, torch.randn(shape[-1], generator=gen).to(device, dtype), 1e-6, 0.0
    yield x, torch.randn(1024, generator=gen).to(device, dtype), 1e-5, 1.0
    yield x, None, 1e-5, 0.0


@norm_add.cases
@add_rms_norm.cases
def _add_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for x, *rest in _cases(device, dtype):
        yield x, torch.full_like(x, 0.3) - x.flip(0), *rest


@norm_add_norm.cases
def _between_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for x, residual, weight, eps, offset in _add_cases(device, dtype):
        yield x, residual, weight, eps, offset, weight, eps, 1 - offset
        yield x, residual, weight, eps, offset, None, 0.1, 0.0
