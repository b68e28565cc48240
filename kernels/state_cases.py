"""Test inputs for the ops with a state: steps with fresh, continued and padding requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# (tokens in this step, tokens after it) of each request; (1, 0) is padding
_STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 1),),
    ((1, 9), (1, 1), (1, 30), (1, 0)),
    ((5, 5), (1, 40), (2, 2), (7, 19), (1, 1), (1, 0)),
    ((2, 8), (40, 40)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStep:
    """A step's tokens and slots; the padding request has the last slot."""

    num_tokens: int
    num_slots: int
    inputs: tuple[Tensor, Tensor, Tensor]  # query_start, context_len, request_row

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    def state(self, shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Random states; slots of fresh requests hold NaN, since they must not be read."""
        start, length, row = self.inputs
        state = torch.randn(self.num_slots, *shape, generator=gen)
        fresh = length.cpu() <= start.cpu().diff()
        state[row.cpu()[fresh]] = float("nan")
        return state.to(row.device, dtype)


def make_step(
    requests: Sequence[tuple[int, int]], gen: torch.Generator, device: torch.device
) -> StateStep:
    """A step of requests given as (tokens in this step, tokens after it), in random slots."""
    slots = len(requests) + 3
    row = torch.randperm(slots - 1, generator=gen)[: len(requests)]
    row[torch.tensor([length == 0 for _, length in requests])] = slots - 1
    counts = [0, *(new for new, _ in requests)]
    return StateStep(
        num_tokens=sum(counts),
        num_slots=slots,
        inputs=(
            torch.tensor(counts).cumsum(0).int().to(device),
            torch.tensor([length for _, length in requests], dtype=torch.int32, device=device),
            row.to(device),
        ),
    )


def step_cases(device: torch.device) -> Iterator[tuple[StateStep, torch.Generator]]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for requests in _STEPS:
        yield make_step(requests, gen, device), gen
