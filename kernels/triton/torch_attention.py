"""Attention of torch's own libraries over packed prompts: how each is called, and what it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmc.kernels.attention import attend
from llmc.kernels.prompts import Prompts

log = logging.getLogger(__name__)

_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """P requests end to end, whose queries are the last tokens of their contexts; causal.

    query [T, H, D], key and value [K, Hkv, D] in 16 bits; query_start, key_start [P + 1] int32 on
    the device say where each request begins, `prompts` the same on the host.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_start: Tensor
    key_start: Tensor
    prompts: Prompts
    scale: float


def flash(p: Packed) -> Tensor:
    """FlashAttention 2 as torch builds it (https://arxiv.org/abs/2307.08691), all in one launch."""
    most_new = max(new for new, _ in p.prompts.lengths)
    most_keys = max(context for _, context in p.prompts.lengths)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        p.query, p.key, p.value, p.query_start, p.key_start, most_new, most_keys, 0.0, True, False,
        scale=p.scale,
    )[0]  # fmt: skip
    return out


def cudnn(p: Packed) -> Tensor:
    """cuDNN's attention, one launch a request. Fresh prompts only: its diagonal starts at 0, 0."""
    if not p.prompts.are_fresh:
        raise ValueError("cuDNN's causal mask takes prompts from their first token on")
    parts = []
    first = 0
    for new, _ in p.prompts.lengths:
        q, k, v = (x[first : first + new].transpose(0, 1)[None] for x in (p.query, p.key, p.value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=p.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        parts.append(out[0].transpose(0, 1))
        first += new
    return parts[0] if len(parts) == 1 else torch.cat(parts)


KERNELS: Mapping[str, Callable[[Packed], Tensor]] = {"flash": flash, "cudnn": cudnn}


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

    def starts(*places: int) -> Tensor:
        return torch.tensor(places, dtype=torch.int32, device=device)

    (new, context), _ = lengths
    probe = Packed(
        query=rand(prompts.num_tokens, 2 * group),
        key=rand(prompts.num_keys, 2),
        value=rand(prompts.num_keys, 2),
        query_start=starts(0, new, prompts.num_tokens),
        key_start=starts(0, context, prompts.num_keys),
        prompts=prompts,
        scale=head_dim**-0.5,
    )
    try:
        got = KERNELS[name](probe)
    except (RuntimeError, TypeError, AttributeError) as e:  # another build or version of torch
        log.warning("torch's %s attention is not used: %s", name, str(e).splitlines()[0][:200])
        return False
    error = (got.float() - expected(probe).float()).abs().max().item()
    if not error <= _TOLERANCE:
        log.warning("torch's %s attention is not used: it is %.3g away", name, error)
        return False
    return True


def expected(p: Packed) -> Tensor:
    """The same by the reference, request by request."""
    parts = []
    first = first_key = 0
    for new, context in p.prompts.lengths:
        place = torch.arange(context, device=p.query.device)
        keys, values = (x[first_key : first_key + context] for x in (p.key, p.value))
        query, query_place = p.query[first : first + new], place[context - new :]
        parts.append(
            attend(query, keys, values, query_place, place, p.scale, 0, 0, 0.0, None, None)
        )
        first, first_key = first + new, first_key + context
    return torch.cat(parts)
