"""Test inputs shared by the ops with a state: steps with fresh, continued and padding requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# (tokens in this step, tokens after it) of each request; (1, 0) is padding
_STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 1),),
    ((1, 9), (1, 1), (1, 30), (1, 0)),
    ((5, 5), (1, 40), (2, 2), (7, 19), (1, 1), (1, 0)),
    ((2, 8), (70, 70)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStep:
    """A step's tokens and slots; the padding request has the last slot."""

    num_tokens: int
    num_slots: int
    inputs: tuple[Tensor, Tensor, Tensor]  # query_start, context_len, request_row

    def state(self, shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Random slots; fresh requests must not read theirs, so these hold NaN."""
        start, length, row = self.inputs
        state = torch.randn(self.num_slots, *shape, generator=gen)
        fresh = length.cpu() <= start.cpu().diff()
        state[row.cpu()[fresh]] = float("nan")
        return state.to(row.device, dtype)


def step_cases(device: torch.device) -> Iterator[tuple[StateStep, torch.Generator]]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for requests in _STEPS:
        count = torch.tensor([new for new, _ in requests])
        slots = len(requests) + 3
        row = torch.randperm(slots - 1, generator=gen)[: len(requests)]
        row[torch.tensor([length == 0 for _, length in requests])] = slots - 1
        start = torch.cat((torch.zeros(1, dtype=torch.int64), count.cumsum(0))).int()
        length = torch.tensor([length for _, length in requests], dtype=torch.int32)
        step = StateStep(
            num_tokens=int(count.sum()),
            num_slots=slots,
            inputs=(start.to(device), length.to(device), row.to(device)),
        )
        yield step, gen
