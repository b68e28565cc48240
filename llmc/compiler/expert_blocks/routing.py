"""What blocks of routed experts compute, whatever their code looks like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from llmc.compiler.expert_blocks.record import Value

# (rows [S, D], expert [S], what else the experts get of each row [S, 1]...) -> [S, D]
Experts = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The values of `combined`: rows [T, D], expert [T, K], weight [T, K], or [T, E] if `is_dense`,
    extras [T, K], all perhaps in other shapes. Without `weight`, each result counts once."""

    rows: Value
    expert: Value
    weight: Value | None
    is_dense: bool
    sums: bool
    extras: tuple[Value, ...] = ()


def combined(
    experts: Experts,
    rows: Tensor,
    expert: Tensor,
    weight: Tensor | None,
    extras: Sequence[Tensor],
    is_dense: bool,
    sums: bool,
) -> Tensor:
    """The weighted results of each token's experts [T K, D], or their sums [T, D]."""
    width = rows.shape[-1]
    rows = rows.reshape(-1, width)
    chosen = expert.reshape(rows.shape[0], -1)
    choices = chosen.shape[1]
    each = rows.unsqueeze(1).expand(-1, choices, -1).reshape(-1, width)
    out = experts(each, chosen.reshape(-1), *(extra.reshape(-1, 1) for extra in extras))
    pairs = out.reshape(-1, choices, width)
    if weight is not None:
        if is_dense:
            weight = weight.reshape(rows.shape[0], -1).gather(1, chosen.long())
        pairs = pairs * weight.reshape(-1, choices, 1)
    return pairs.sum(1) if sums else pairs.reshape(-1, width)
