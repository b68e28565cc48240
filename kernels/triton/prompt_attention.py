"""A step whose prompts go to another kernel: the rest stays with ours, and the outputs are joined.

    query ─┬─ before the prompts ─ our kernel, over pages ──────────────────────┬─ out
           └─ prompts ─ keys and values out of their pages ─ flash or cuDNN ─────┘

The copy out of the pages reads what the cache write has just left in the L2 cache, and takes a
few per cent of the attention that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels import prompt_table
from llmc.kernels.prompt_table import OWN, Measured, choose
from llmc.kernels.prompts import Prompts
from llmc.kernels.triton import gather_pages, torch_attention
from llmc.kernels.triton.torch_attention import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """What `paged_attention` is given, where it has no window, softcap, sinks or slopes, and caches
    of query's dtype."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    scale: float

    def part(self, requests: slice, tokens: slice) -> Paged:
        """Some requests next to each other, and their tokens."""
        ends = slice(requests.start, requests.stop + 1)
        return replace(
            self,
            query=self.query[tokens],
            query_start=self.query_start[ends] - tokens.start,
            context_len=self.context_len[requests],
            block_table=self.block_table[requests],
        )


@lru_cache
def _lines(device: torch.device) -> tuple[Measured, ...]:
    return prompt_table.measured_on(device)


def choose_kernel(query: Tensor, key_cache: Tensor, prompts: Prompts) -> str:
    """The name of the kernel for a step's prompts: measured as fastest, and right where we are."""
    head_dim = query.shape[2]
    name = choose(_lines(query.device), head_dim, prompts)
    if name == OWN:
        return OWN
    group = query.shape[1] // key_cache.shape[1]
    is_right = torch_attention.works(name, head_dim, group, query.dtype, query.device)
    return name if is_right else OWN


def attend(name: str, own: Callable[[Paged], Tensor], step: Paged, prompts: Prompts) -> Tensor:
    """[T, H, D]. `name`: the kernel for the prompts; `own`: ours, for any step."""
    if name == OWN:
        return own(step)
    begin, stop = prompts.first_token, prompts.first_token + prompts.num_tokens
    requests = slice(prompts.first_request, prompts.end_request)
    of_prompts = torch_attention.KERNELS[name](
        _packed(step.part(requests, slice(begin, stop)), prompts)
    )
    if stop - begin == step.query.shape[0]:
        return of_prompts
    out = torch.zeros_like(step.query)
    out[begin:stop] = of_prompts
    if begin:
        out[:begin] = own(step.part(slice(0, prompts.first_request), slice(0, begin)))
    return out  # what comes after the prompts is padding


def _packed(step: Paged, prompts: Prompts) -> Packed:
    """The prompts alone, with their keys and values out of the pages."""
    key_start = step.query_start
    if not prompts.are_fresh:
        key_start = F.pad(step.context_len.cumsum(0, dtype=torch.int32), (1, 0))
    longest = max(context for _, context in prompts.lengths)
    key, value = gather_pages.plan(
        step.key_cache, step.value_cache, key_start, step.block_table, prompts.num_keys, longest
    ).run()
    return Packed(
        query=step.query, key=key, value=value, query_start=step.query_start,
        key_start=key_start, prompts=prompts, scale=step.scale,
    )  # fmt: skip
