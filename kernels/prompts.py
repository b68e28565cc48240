"""`Prompts`: which requests of a step are prompts, a hint for attention that is read on the host.

Sizes on the device can't be read without a synchronization, and torch's attention needs them as
Python numbers. So the runner passes them along with the step's inputs, in a host tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmc.kernels.tuned import tuned

MIN_TOKENS = 128  # shorter prompts gain nothing from another kernel
_MAX_HEAD_DIM = 256  # limit of FlashAttention 2, which also requires multiples of 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    min_tokens: int  # of prompts that FlashAttention computes


@tuned()
def prompt_config(dim: int) -> PromptConfig:
    """dim: the head size."""
    return PromptConfig(min_tokens=MIN_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Consecutive requests from `first_request` on, whose tokens begin at `first_token`.

    `lengths`: the number of new tokens of each in this step; `contexts`: their total tokens after
    it, which defaults to `lengths` (new prompts).
    """

    first_request: int = 0
    first_token: int = 0
    lengths: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.contexts:
            object.__setattr__(self, "contexts", self.lengths)

    @staticmethod
    def find(requests: Sequence[tuple[int, int]], least: int, *, started: bool = False) -> Prompts:
        """The longest run of requests at the end of a step, given as (new tokens, context after
        it), that have at least `least` new tokens each and start in this step. With `started`, they
        can also have started in an earlier step."""
        first = len(requests)
        while first and requests[first - 1][0] >= least:
            if not started and requests[first - 1][0] != requests[first - 1][1]:
                break
            first -= 1
        return Prompts(
            first_request=first,
            first_token=sum(new for new, _ in requests[:first]),
            lengths=tuple(new for new, _ in requests[first:]),
            contexts=tuple(context for _, context in requests[first:]),
        )

    @staticmethod
    def read(words: Tensor) -> Prompts:
        """The inverse of `words()`."""
        request, token, *rest = words.tolist()
        count = len(rest) // 2
        return Prompts(
            first_request=request,
            first_token=token,
            lengths=tuple(rest[:count]),
            contexts=tuple(rest[count:]),
        )

    def words(self) -> Tensor:
        """[2 + 2 P] int32 in host memory: first request, first token, lengths, then contexts."""
        return torch.tensor(
            [self.first_request, self.first_token, *self.lengths, *self.contexts],
            dtype=torch.int32,
        )

    def followed_by(self, others: Prompts) -> Prompts:
        """These prompts and `others`, which directly follow them."""
        return replace(
            self, lengths=self.lengths + others.lengths, contexts=self.contexts + others.contexts
        )

    @property
    def end_request(self) -> int:
        return self.first_request + len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens


def fits_flash(
    *,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    window: int,
    chunk: int,
    softcap: float,
    sinks: object,
    slopes: object,
    chosen: object = None,
    v_dim: int = 0,
    distance_bias: object = None,
    **others: object,
) -> bool:
    """Whether FlashAttention computes `paged_attention` of these arguments: plain and causal, in 16
    bits, heads of up to 256 channels."""
    dim = query.shape[2]
    return (
        window == chunk == 0
        and softcap == 0
        and sinks is None
        and slopes is None
        and chosen is None
        and v_dim == 0
        and distance_bias is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and key_cache.dtype == value_cache.dtype == query.dtype
        and dim == value_cache.shape[3] <= _MAX_HEAD_DIM
        and dim % 8 == 0
    )
