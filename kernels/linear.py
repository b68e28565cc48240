"""`linear`: a linear layer over the weight as the checkpoint stores it, for steps of few tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.registry import Case, op


def _shape(*, x: Tensor, weight: Tensor, **others: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@op(shape=_shape)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> x weight^T + bias [..., N] in x's dtype.

    Summed in float32 and rounded once.
    """
    return F.linear(x, weight, bias)


@linear.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    shapes = ((1,), 64, 48), ((3,), 100, 33), ((1, 2, 5), 256, 96), ((70,), 130, 50), ((1,), 7, 3)
    for rows, k, n in shapes:
        x = torch.randn(*rows, k, generator=gen)
        weight = torch.randn(n, k, generator=gen) * k**-0.5
        bias = torch.randn(n, generator=gen) if n % 2 == 0 else None
        yield (
            x.to(device, dtype),
            weight.to(device, dtype),
            None if bias is None else bias.to(device, dtype),
        )
