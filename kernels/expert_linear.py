"""`expert_linear`: a linear in which each row selects its weight, for routed experts.

`sort_experts` sorts the rows of a layer once for all its linears.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.act_mul import act_mul
from llmc.kernels.registry import Case, op


def _shape(
    *,
    x: Tensor,
    weight: Tensor,
    expert: Tensor,
    transposed: bool,
    act: str | None,
    **others: object,
) -> Tensor:
    channels = weight.shape[2] if transposed else weight.shape[1]
    return x.new_empty(expert.shape[0], channels // (1 if act is None else 2))


@op(shape=_shape)
def expert_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    transposed: bool,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
    act: str | None = None,
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """x [T, K], weight [E, N, K] ([E, K, N] when transposed), bias [E, N], expert [S] -> [S, N].

    S = C T: expert has the C choices of each row of x, row by row; often C is 1.
    out[s] = weight[expert[s]] @ x[s // C] + bias[expert[s]]. Results of one expert are computed
    together, so that each weight is read at most once. An expert outside [0, E) gives zeros.
    order, offsets: `sort_experts` of these experts, so that they are not sorted again.
    act, limit, shift, interleaved: `act_mul` of the results, [S, N / 2].
    """
    x = choices_of(x, expert)
    out = x.new_zeros(x.shape[0], weight.shape[2] if transposed else weight.shape[1])
    for e in expert.unique().tolist():
        if not 0 <= e < weight.shape[0]:
            continue
        rows = (expert == e).nonzero()[:, 0]
        w = weight[e].T if transposed else weight[e]
        out[rows] = F.linear(x[rows], w, None if bias is None else bias[e])
    return out if act is None else act_mul.reference(out, act, limit, shift, interleaved)


def choices_of(x: Tensor, expert: Tensor) -> Tensor:
    """x [T, K], expert [C T] -> [C T, K]: each row of x, once for each of its choices."""
    return x.repeat_interleave(expert.shape[0] // max(1, x.shape[0]), 0)


@expert_linear.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    clamped = ("quick_gelu", 0.75, 1.0, True)
    for rows, choices, experts, n, k, transposed, biased, gated in (
        (1, 1, 4, 16, 32, False, False, ()),
        (13, 1, 8, 24, 40, True, True, ()),
        (40, 1, 3, 64, 64, False, True, ()),
        (5, 4, 8, 24, 40, False, True, ()),
        (80, 3, 3, 16, 32, False, False, ()),
        (1, 2, 4, 16, 32, False, False, ("silu", 0.5)),
        (5, 4, 8, 74, 40, True, True, ("gelu_tanh",)),
        (80, 3, 3, 144, 32, False, True, ("gelu",)),
        (5, 4, 8, 74, 40, True, True, clamped),
        (80, 3, 3, 144, 32, False, True, clamped),
    ):
        shape = (experts, k, n) if transposed else (experts, n, k)
        yield (
            torch.randn(rows, k, generator=gen).to(device, dtype),
            (torch.randn(*shape, generator=gen) * k**-0.5).to(device, dtype),
            torch.randn(experts, n, generator=gen).to(device, dtype) if biased else None,
            torch.randint(-1, experts, (rows * choices,), generator=gen).to(device),
            transposed,
            *((None, None, *gated) if gated else ()),
        )


def _sorted_shape(*, expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(expert), expert.new_empty(experts + 1, dtype=torch.int32)


@op(shape=_sorted_shape)
def sort_experts(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """expert [S] int64 -> (order [S] int64, offsets [experts + 1] int32).

    order[offsets[e] : offsets[e + 1]] are the rows of expert e, in ascending order. Rows of numbers
    outside [0, experts) are before the first offset or after the last. If there are so few rows
    that an implementation's linears don't need their order, it may leave both unset.
    """
    ordered, order = expert.sort(stable=True)
    edges = torch.arange(experts + 1, device=expert.device, dtype=ordered.dtype)
    return order, torch.searchsorted(ordered, edges, out_int32=True)


@sort_experts.cases
def _sort_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for rows, experts in ((1500, 8), (1025, 130)):
        yield torch.randint(-1, experts + 2, (rows,), generator=gen).to(device), experts
