"""`add_lora`: add each row's LoRA adapter output to the output of a linear.

For routed experts, each row also selects an expert of its adapter.

LoRA: Hu et al., 2021, https://arxiv.org/abs/2106.09685. Rows of many adapters in one product:
Chen et al., Punica, 2023, https://arxiv.org/abs/2310.18547.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


@op(mutates=("out",))
def add_lora(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    bounds: Tensor,
    adapter: Tensor,
    expert: Tensor | None = None,
) -> None:
    """out [..., N] += B A x [..., K] with each row's adapter; S rows in total, updated in place.

    a [slots, P, R, K] and b [slots, R, N] have the dtype of x and `out`. The linear consists of P
    linears with a common input: bounds [P + 1] int32, from 0 to N, has the first output channel of
    each, and the channels of part p use only a[slot, p].
    adapter [S] int32: slot + 1 of each row; for 0 or an invalid slot the row is unchanged.
    Ranks below R are padded with zeros, and an adapter's scale is folded into b. Sums are in
    float32 and rounded once.

    For routed experts, as in `expert_linear`: expert [S] int64 of each row, a [slots, E, R, K] and
    b [slots, E, R, N], P = 1. adapter [T] is per token; a token's S / T rows are consecutive. An
    expert outside [0, E) leaves the row unchanged.
    """
    rows, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    edges = bounds.tolist()
    if expert is not None:
        a, b, adapter = experts_as_slots(a, b, adapter, expert)
    for number in adapter.unique().tolist():
        if not 0 < number <= a.shape[0]:
            continue
        mine = (adapter == number).nonzero()[:, 0]
        given = rows[mine].float()
        for part, (begin, end) in enumerate(zip(edges, edges[1:], strict=False)):
            low = given @ a[number - 1, part].float().T
            own = flat[mine, begin:end].float() + low @ b[number - 1, :, begin:end].float()
            flat[mine, begin:end] = own.to(out.dtype)


def experts_as_slots(
    a: Tensor, b: Tensor, adapter: Tensor, expert: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """a [slots * E, 1, R, K], b [slots * E, R, N] and adapter [S]: every expert becomes a slot."""
    numbers = of_experts(adapter, expert, *a.shape[:2])
    return a.flatten(0, 1).unsqueeze(1), b.flatten(0, 1), numbers


def of_experts(adapter: Tensor, expert: Tensor, slots: int, experts: int) -> Tensor:
    """For each row [S], 1 + the index of its A and B among the experts of all slots; 0: none."""
    slot = adapter.repeat_interleave(expert.shape[0] // adapter.shape[0])
    is_there = (slot > 0) & (slot <= slots) & (expert >= 0) & (expert < experts)
    return torch.where(is_there, (slot - 1) * experts + expert + 1, 0)


@add_lora.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=gen)).to(device, dtype)

    for lead, k, widths, slots, rank, spread in (
        ((1,), 32, (16,), 1, 4, (0,)),  # no row has an adapter
        ((1, 7), 40, (24, 8, 8), 3, 8, (0, 1, 3, -1, 4)),  # includes invalid slots
        ((29,), 64, (33, 31), 2, 5, (1, 2)),
        ((2,), 72, (48,), 4, 16, (4,)),
    ):
        rows, channels = torch.Size(lead).numel(), sum(widths)
        picked = torch.tensor(spread)[torch.randint(len(spread), (rows,), generator=gen)]
        edges = [sum(widths[:i]) for i in range(len(widths) + 1)]
        yield (
            draw(*lead, channels),
            draw(*lead, k),
            draw(slots, len(widths), rank, k, scale=k**-0.5),
            draw(slots, rank, channels, scale=rank**-0.5),
            torch.tensor(edges, dtype=torch.int32, device=device),
            picked.to(device, torch.int32),
        )
    for tokens, choices, k, n, slots, experts, rank in (
        (3, 2, 40, 24, 2, 4, 4),
        (19, 3, 64, 33, 3, 5, 8),
    ):
        rows = tokens * choices
        yield (
            draw(rows, n),
            draw(rows, k),
            draw(slots, experts, rank, k, scale=k**-0.5),
            draw(slots, experts, rank, n, scale=rank**-0.5),
            torch.tensor([0, n], dtype=torch.int32, device=device),
            torch.randint(-1, slots + 2, (tokens,), generator=gen).to(device, torch.int32),
            torch.randint(-1, experts + 1, (rows,), generator=gen).to(device),
        )
