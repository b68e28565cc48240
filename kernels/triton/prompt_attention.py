"""A step whose prompts go to another kernel: the rest stays with ours, and the outputs are joined.

    query ─┬─ before the prompts ─ our kernel, over pages ──────────────────────┬─ out
           └─ prompts ─ keys and values out of their pages ─ flash or cuDNN ─────┘

The copy out of the pages reads what the cache write has just left in the L2 cache, and takes a
few per cent of the attention that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels import prompt_table
from llmc.kernels.prompt_table import OWN, Measured, choose
from llmc.kernels.prompts import Prompts
from llmc.kernels.triton import gather_pages, torch_attention

# attention of our kernel over (query, query_start, context_len, block_table)
Own = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


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


def attend(
    name: str,
    own: Own,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    prompts: Prompts,
    scale: float,
) -> Tensor:
    """`paged_attention` without window, softcap, sinks or slopes, over caches of query's dtype.

    `name`: the kernel for the prompts.
    """
    if name == OWN:
        return own(query, query_start, context_len, block_table)
    first, end = prompts.first_request, prompts.end_request
    begin, stop = prompts.first_token, prompts.first_token + prompts.num_tokens
    of_prompts = _of_prompts(
        name,
        query[begin:stop],
        key_cache,
        value_cache,
        query_start[first : end + 1] - begin,
        context_len[first:end],
        block_table[first:end],
        prompts,
        scale,
    )
    if stop - begin == query.shape[0]:
        return of_prompts
    out = query.new_zeros(query.shape[0], query.shape[1], value_cache.shape[3])
    out[begin:stop] = of_prompts
    if begin:
        out[:begin] = own(
            query[:begin], query_start[: first + 1], context_len[:first], block_table[:first]
        )
    return out  # what comes after the prompts is padding


def _of_prompts(
    name: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    prompts: Prompts,
    scale: float,
) -> Tensor:
    key_start = query_start
    if not prompts.are_fresh:
        key_start = F.pad(context_len.cumsum(0, dtype=torch.int32), (1, 0))
    longest = max(context for _, context in prompts.lengths)
    pages = gather_pages.plan(
        key_cache, value_cache, key_start, block_table, prompts.num_keys, longest
    )
    key, value = pages.run()
    return torch_attention.KERNELS[name](query, key, value, query_start, key_start, prompts, scale)
