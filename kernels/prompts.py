"""`Prompts`: which requests of a step are prompts, a hint to attention that only the host reads.

Sizes on the device can't be known without waiting for it, and a kernel of somebody else's wants
them as numbers. So the runner says them beside the step's inputs, in a tensor on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_TOKENS = 128  # new tokens from which a request is a prompt: shorter ones gain nothing

Lengths = tuple[int, int]  # new tokens of a request, and its context after the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Requests side by side, from `first_request` on; their tokens begin at `first_token`."""

    first_request: int = 0
    first_token: int = 0
    lengths: tuple[Lengths, ...] = ()

    @staticmethod
    def find(requests: Sequence[Lengths], least: int = MIN_TOKENS) -> Prompts:
        """The last requests of a step that have `least` new tokens or more each."""
        first = len(requests)
        while first and requests[first - 1][0] >= least:
            first -= 1
        token = sum(new for new, _ in requests[:first])
        return Prompts(first_request=first, first_token=token, lengths=tuple(requests[first:]))

    @staticmethod
    def read(words: Tensor) -> Prompts:
        """What `words` holds."""
        request, token, *lengths = words.tolist()
        pairs = tuple(zip(lengths[::2], lengths[1::2], strict=True))
        return Prompts(first_request=request, first_token=token, lengths=pairs)

    def words(self) -> Tensor:
        """[2 + 2 P] int32 on the host: first request, first token, then the lengths of each."""
        flat = [n for pair in self.lengths for n in pair]
        return torch.tensor([self.first_request, self.first_token, *flat], dtype=torch.int32)

    @property
    def end_request(self) -> int:
        return self.first_request + len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.lengths)

    @property
    def num_keys(self) -> int:
        return sum(context for _, context in self.lengths)

    @property
    def are_fresh(self) -> bool:
        """Nothing of them was computed in an earlier step."""
        return all(new == context for new, context in self.lengths)


def is_plain(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    window: int,
    chunk: int,
    softcap: float,
    sinks: object,
    slopes: object,
) -> bool:
    """Whether attention is of the kind that every library computes: causal, in 16 bits."""
    return (
        window == chunk == 0
        and softcap == 0
        and sinks is None
        and slopes is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and key_cache.dtype == value_cache.dtype == query.dtype
        and key_cache.shape[3] == value_cache.shape[3]
    )
