"""`add_lora`: each row of a linear's output gets the low-rank part of the adapter that it picked.

LoRA: Hu et al., 2021, https://arxiv.org/abs/2106.09685. Rows of many adapters in one product:
Chen et al., Punica, 2023, https://arxiv.org/abs/2310.18547.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


@op(mutates=("out",))
def add_lora(out: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, adapter: Tensor) -> None:
    """out [..., N] += B A x [..., K] of each row's adapter; S rows in all, written in place.

    a [slots, P, R, K] and b [slots, R, N], in the dtype of x and `out`. The linear is P linears of
    one input: bounds [P + 1] int32, from 0 to N, are where the output channels of each begin, and
    those of part p read a[slot, p] alone.
    adapter [S] int32: slot + 1 of each row; 0, or a number of no slot, leaves the row as it is.
    Ranks below R are padded with zeros, and the scale of an adapter is in b. Sums are in float32
    and rounded once.
    """
    rows, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    edges = bounds.tolist()
    for number in adapter.unique().tolist():
        if not 0 < number <= a.shape[0]:
            continue
        mine = (adapter == number).nonzero()[:, 0]
        given = rows[mine].float()
        for part, (begin, end) in enumerate(zip(edges, edges[1:], strict=False)):
            low = given @ a[number - 1, part].float().T
            own = flat[mine, begin:end].float() + low @ b[number - 1, :, begin:end].float()
            flat[mine, begin:end] = own.to(out.dtype)


@add_lora.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=gen)).to(device, dtype)

    for lead, k, widths, slots, rank, spread in (
        ((1,), 32, (16,), 1, 4, (0,)),  # nobody has an adapter
        ((1, 7), 40, (24, 8, 8), 3, 8, (0, 1, 3, -1, 4)),  # and numbers of no slot
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
