"""`choose_experts` and `sum_experts`: before and after the linears of routed experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from llmc.kernels.registry import Case, op

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
}


def _shape(
    *, logits: Tensor, count: int, dtype: torch.dtype, shared: int, **others: object
) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], count + shared
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@op(shape=_shape)
def choose_experts(
    logits: Tensor,
    slot_mapping: Tensor | None,
    count: int,
    normalized: bool,
    dtype: torch.dtype,
    correction: Tensor | None = None,
    score: str = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    sum_eps: float = 0.0,
    factor: float = 1.0,
    shared: int = 0,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> (weight [T, C] in dtype, expert [T, C] int64), highest first; C is count.

    The experts are those with the `count` highest values of score(logits) + correction [E], where
    score is one of SCORES. Only experts of the kept_groups best of `groups` groups of
    neighbours are chosen; a group's rank is the sum of its two highest values
    (arXiv:2412.19437, section 2.1.2). The weights are the scores without correction, divided by
    their sum + sum_eps if normalized, times factor. All is computed in float32. With `shared`
    experts, which every token has, C is count + shared: they come last, with the numbers from E on
    and the weight 1; if gated, logits is [T, E + shared], and their weights are the sigmoid of the
    last. Padding tokens, whose slot_mapping [T] is negative, get the expert
    E + shared, which `expert_linear` does not read.
    """
    wide = logits.float()
    wide, gates = (wide[:, :-shared], wide[:, -shared:]) if gated else (wide, None)
    scores = SCORES[score](wide)
    ranked = scores if correction is None else scores + correction.float()
    if kept_groups < groups:
        grouped = ranked.unflatten(-1, (groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(kept_groups).indices
        is_kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        ranked = grouped.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(1)
    expert = ranked.topk(count).indices
    shares = scores.gather(-1, expert)
    if normalized:
        shares = shares / (shares.sum(-1, keepdim=True) + sum_eps)
    shares *= factor
    tokens, experts = wide.shape
    if shared:
        last = torch.arange(experts, experts + shared, device=expert.device)
        expert = torch.cat((expert, last.expand(tokens, -1)), -1)
        own = shares.new_ones(tokens, shared) if gates is None else gates.sigmoid()
        shares = torch.cat((shares, own), -1)
    if slot_mapping is not None:
        expert = expert.masked_fill((slot_mapping < 0)[:, None], experts + shared)
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
    for tokens, experts, count, score, groups, kept, normalized, shared in (
        (3, 60, 4, "sigmoid", 1, 1, False, 0),
        (4, 128, 8, "softmax", 1, 1, True, 1),
        (3, 60, 5, "sqrt_softplus", 1, 1, False, 2),
        (3, 64, 6, "sqrt_softplus", 1, 1, True, 0),
        (5, 64, 6, "sigmoid", 8, 4, True, 1),
        (2, 8, 2, "sigmoid", 4, 1, True, 0),
        (2, 32, 3, "sigmoid", 2, 1, False, 0),
    ):
        order = torch.stack([torch.randperm(experts, generator=gen) for _ in range(tokens)])
        correction = torch.randperm(experts, generator=gen) / 61  # no sum is that of others
        slots = torch.randint(-1, 2, (tokens,), generator=gen).to(device) if shared else None
        yield (
            (order / 16).to(device, dtype), slots, count, normalized, dtype,
            None if not normalized else correction.to(device), score, groups, kept, 1e-3, 2.5,
            shared,
        )  # fmt: skip
    for tokens, experts, shared, score in ((1, 8, 1, "softmax"), (3, 61, 2, "sigmoid")):
        order = torch.stack([torch.randperm(experts, generator=gen) for _ in range(tokens)]) / 16
        gates = 20 * torch.randn(tokens, shared, generator=gen)  # some higher than all logits
        logits = torch.cat((order, gates), -1).to(device, dtype)
        yield logits, None, 4, True, dtype, None, score, 1, 1, 0.0, 1.0, shared, True


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
