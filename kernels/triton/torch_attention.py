"""Attention of torch's own libraries over packed prompts: how each is called, and what it takes.

All compute causal attention of P requests laid end to end, whose queries are the last tokens of
their contexts: query [T, H, D], key and value [K, Hkv, D] in 16 bits -> [T, H, D].
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmc.kernels.attention import attend
from llmc.kernels.prompts import Prompts

log = logging.getLogger(__name__)

# (query, key, value, query_start [P + 1] int32, key_start [P + 1] int32, prompts, scale)
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Prompts, float], Tensor]

_TOLERANCE = 2e-2


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    prompts: Prompts,
    scale: float,
) -> Tensor:
    """FlashAttention 2 as torch builds it (https://arxiv.org/abs/2307.08691), all in one launch."""
    most_new = max(new for new, _ in prompts.lengths)
    most_keys = max(context for _, context in prompts.lengths)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, query_start, key_start, most_new, most_keys, 0.0, True, False,
        scale=scale,
    )[0]  # fmt: skip
    return out


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    prompts: Prompts,
    scale: float,
) -> Tensor:
    """cuDNN's attention, one launch a request. Fresh prompts only: its diagonal starts at 0, 0."""
    if not prompts.are_fresh:
        raise ValueError("cuDNN's causal mask takes prompts from their first token on")
    parts = []
    first = 0
    for new, _ in prompts.lengths:
        q, k, v = (x[first : first + new].transpose(0, 1)[None] for x in (query, key, value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        parts.append(out[0].transpose(0, 1))
        first += new
    return parts[0] if len(parts) == 1 else torch.cat(parts)


KERNELS: Mapping[str, Attend] = {"flash": flash, "cudnn": cudnn}


@cache
def works(name: str, head_dim: int, group: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel is there and right on this machine: two small prompts tell.

    `group`: query heads a key head. A kernel that fails is told of once and never called again.
    """
    lengths = ((33, 33), (70, 70)) if name == "cudnn" else ((33, 47), (70, 70))
    prompts = Prompts(lengths=lengths)
    gen = torch.Generator(device="cpu").manual_seed(0)

    def rand(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, head_dim, generator=gen).to(device, dtype)

    query = rand(prompts.num_tokens, 2 * group)
    key, value = (rand(prompts.num_keys, 2) for _ in "kv")
    (new, context), _ = lengths
    query_start = torch.tensor([0, new, prompts.num_tokens], dtype=torch.int32, device=device)
    key_start = torch.tensor([0, context, prompts.num_keys], dtype=torch.int32, device=device)
    try:
        got = KERNELS[name](query, key, value, query_start, key_start, prompts, head_dim**-0.5)
    except (RuntimeError, TypeError, AttributeError) as e:  # another build or version of torch
        log.warning("torch's %s attention is not used: %s", name, str(e).splitlines()[0][:200])
        return False
    want = expected(query, key, value, prompts, head_dim**-0.5)
    error = (got.float() - want.float()).abs().max().item()
    if not error <= _TOLERANCE:
        log.warning("torch's %s attention is not used: it is %.3g away", name, error)
        return False
    return True


def expected(query: Tensor, key: Tensor, value: Tensor, prompts: Prompts, scale: float) -> Tensor:
    """The same by the reference, request by request."""
    parts = []
    first = first_key = 0
    for new, context in prompts.lengths:
        place = torch.arange(context, device=query.device)
        keys, values = (x[first_key : first_key + context] for x in (key, value))
        parts.append(
            attend(query[first : first + new], keys, values, place[context - new :], place, scale,
                   0, 0, 0.0, None, None)
        )  # fmt: skip
        first, first_key = first + new, first_key + context
    return torch.cat(parts)
