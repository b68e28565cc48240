"""`expert_linear`: a linear in which each row selects its weight, for routed experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.registry import Case, op


def _shape(*, x: Tensor, weight: Tensor, transposed: bool, **others: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2] if transposed else weight.shape[1])


@op(shape=_shape)
def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, transposed: bool
) -> Tensor:
    """x [S, K], weight [E, N, K] ([E, K, N] when transposed), bias [E, N], expert [S] -> [S, N].

    out[s] = weight[expert[s]] @ x[s] + bias[expert[s]]. Rows of one expert are computed together,
    so that each weight is read at most once. An expert outside [0, E) gives a row of zeros.
    """
    out = x.new_zeros(x.shape[0], weight.shape[2] if transposed else weight.shape[1])
    for e in expert.unique().tolist():
        if not 0 <= e < weight.shape[0]:
            continue
        rows = (expert == e).nonzero()[:, 0]
        w = weight[e].T if transposed else weight[e]
        out[rows] = F.linear(x[rows], w, None if bias is None else bias[e])
    return out


@expert_linear.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for rows, experts, n, k, transposed, biased in (
        (1, 4, 16, 32, False, False),
        (13, 8, 24, 40, True, True),
        (40, 3, 64, 64, False, True),
    ):
        shape = (experts, k, n) if transposed else (experts, n, k)
        yield (
            torch.randn(rows, k, generator=gen).to(device, dtype),
            torch.randn(*shape, generator=gen).to(device, dtype),
            torch.randn(experts, n, generator=gen).to(device, dtype) if biased else None,
            torch.randint(0, experts, (rows,), generator=gen).to(device),
            transposed,
        )
