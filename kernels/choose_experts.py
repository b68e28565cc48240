"""`choose_experts` and `sum_experts`: before and after the linears of routed experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


def _shape(
    *, logits: Tensor, count: int, dtype: torch.dtype, **others: object
) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], count
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@op(shape=_shape)
def choose_experts(
    logits: Tensor, slot_mapping: Tensor | None, count: int, normalized: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> (weight [T, count] in dtype, expert [T, count] int64), highest first.

    The weights are softmax(logits) of the `count` highest logits, divided by their sum if
    normalized; computed in float32. Padding tokens, whose slot_mapping [T] is negative, get the
    expert E, which `expert_linear` does not read.
    """
    shares, expert = logits.float().softmax(-1).topk(count)
    if normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    if slot_mapping is not None:
        expert = expert.masked_fill((slot_mapping < 0)[:, None], logits.shape[1])
    return shares.to(dtype), expert


@choose_experts.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for tokens, experts, count, padded, normalized in (
        (1, 4, 2, False, False),
        (5, 128, 8, True, True),
        (3, 60, 4, True, False),
    ):
        # distinct in every dtype: which of equal logits are chosen is not defined
        logits = torch.stack([torch.randperm(experts, generator=gen) for _ in range(tokens)]) / 16
        slots = torch.randint(-1, 2, (tokens,), generator=gen).to(device) if padded else None
        yield logits.to(device, dtype), slots, count, normalized, dtype


def _sum_shape(*, rows: Tensor, weight: Tensor, dtype: torch.dtype, **others: object) -> Tensor:
    return rows.new_empty(weight.shape[0], rows.shape[1], dtype=dtype)


@op(shape=_sum_shape)
def sum_experts(
    rows: Tensor, weight: Tensor, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """rows [T * C, N], weight [T, C] -> [T, N] in dtype: the sum of weight[t, c] times row
    t * C + c, and of residual [T, N], in float32."""
    pairs = rows.float().unflatten(0, (-1, weight.shape[1]))
    total = torch.sum(pairs * weight.float().unsqueeze(-1), 1)
    return (total if residual is None else total + residual.float()).to(dtype)


@sum_experts.cases
def _sum_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for tokens, count, width in ((1, 2, 24), (7, 8, 1030)):
        rows = torch.randn(tokens * count, width, generator=gen).to(device, dtype)
        weight = torch.rand(tokens, count, generator=gen).to(device)
        yield rows, weight, dtype
        yield rows, weight, dtype, torch.randn(tokens, width, generator=gen).to(device, dtype)
        yield rows, weight.to(dtype), torch.float32
