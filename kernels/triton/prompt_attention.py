"""A step's new prompts go to torch's FlashAttention, the rest to our kernel; outputs are combined.

    query ─┬─ before the prompts ─ our kernel, over pages ───────────────┬─ out
           └─ prompts ─ keys and values out of their pages ─ flash ──────┘

The copy out of the pages reads data that the cache write has just left in the L2 cache.
FlashAttention 2 supports packed requests of any lengths in one launch and needs no plan per length,
so it is used here instead of cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from llmc.kernels.prompts import Prompts
from llmc.kernels.triton import gather_pages


@cache
def has_flash(device: torch.device) -> bool:
    """Whether torch has FlashAttention 2 and this GPU supports it (sm_80 and later)."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def flash(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor, lengths: tuple[int, ...], scale: float
) -> Tensor:
    """Causal attention of P packed requests (https://arxiv.org/abs/2307.08691).

    query [T, H, D], key and value [T, Hkv, D] in 16 bits, start [P + 1] int32 -> [T, H, D].
    """
    longest = max(lengths)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, start, start, longest, longest, 0.0, True, False, scale=scale
    )[0]
    return out


def attend(own: Callable[..., Tensor], step: Mapping[str, Any], prompts: Prompts) -> Tensor:
    """`paged_attention` with the arguments `step`: [T, H, D]. `own`: our kernel."""
    query: Tensor = step["query"]
    first, stop = prompts.first_token, prompts.first_token + prompts.num_tokens
    of_prompts = _attend_prompts(
        part_of(step, slice(prompts.first_request, prompts.end_request), slice(first, stop)),
        prompts.lengths,
    )
    if prompts.num_tokens == query.shape[0]:
        return of_prompts
    out = torch.zeros_like(query)
    out[first:stop] = of_prompts
    if first:
        out[:first] = own(**part_of(step, slice(0, prompts.first_request), slice(0, first)))
    return out  # only padding comes after the prompts


def part_of(step: Mapping[str, Any], requests: slice, tokens: slice) -> dict[str, Any]:
    """The arguments for a range of requests and their tokens."""
    bounds = slice(requests.start, requests.stop + 1)
    return {
        **step,
        "query": step["query"][tokens],
        "query_start": step["query_start"][bounds] - tokens.start,
        "context_len": step["context_len"][requests],
        "block_table": step["block_table"][requests],
    }


def _attend_prompts(part: Mapping[str, Any], lengths: tuple[int, ...]) -> Tensor:
    start: Tensor = part["query_start"]
    key, value = gather_pages.plan(
        part["key_cache"], part["value_cache"], start, part["block_table"], sum(lengths),
        max(lengths),
    ).run()  # fmt: skip
    return flash(part["query"], key, value, start, lengths, part["scale"])
