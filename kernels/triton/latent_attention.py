"""`latent_attention` on GPUs: torch's matrix products around our paged attention, in two forms.

    query ─┬─ few new tokens ─ meet the weight ─ attention over latents ─ meets the weight ─┬─ out
           └─ many ─ latents out of their pages ─ weight ─ attention over keys and values ──┘

The host knows the requests of a step only from a hint, as in `prompt_attention`. Without the hint,
a step reads nothing on the host and can run in a CUDA graph. Expanded keys and values are laid out
as pages again, so that requests of any length are one launch of the same kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.attention import expanded_dim
from llmc.kernels.cache_dtype import caches_fit, read_blocks
from llmc.kernels.latent_attention import MAX_BYTES, expands, latent_attention
from llmc.kernels.prompts import Prompts
from llmc.kernels.triton.define import define, same_dtype, supports_tensors
from llmc.kernels.triton.launch import cdiv
from llmc.kernels.triton.paged_attention import MAX_HEAD_DIM, MAX_REQUESTS, attend
from llmc.kernels.triton.prompt_attention import part_of

Step = Mapping[str, Any]  # the op's arguments without the hint


def _run(*args: Any) -> Tensor:
    step = latent_attention.bind(args)
    hint = step.pop("prompts")
    groups = [] if hint is None else _groups(step, Prompts.read(hint))
    if not groups:
        return _absorbed(step)
    query: Tensor = step["query"]
    out: Tensor = query.new_zeros(*query.shape[:2], _value_dim(step))
    end = Prompts(first_request=step["context_len"].shape[0], first_token=query.shape[0])
    done = Prompts()
    for group in (*groups, end):
        between = slice(done.end_request, group.first_request)
        tokens = slice(done.end_token, group.first_token)
        if between.stop > between.start and tokens.stop > tokens.start:
            out[tokens] = _absorbed(part_of(step, between, tokens))
        if group.lengths:
            requests = slice(group.first_request, group.end_request)
            tokens = slice(group.first_token, group.end_token)
            out[tokens] = _expanded(part_of(step, requests, tokens), group.contexts)
        done = group
    return out


def _value_dim(step: Step) -> int:
    heads, dim = step["query"].shape[1:]
    return expanded_dim(dim, heads, step["weight"], step["key_cache"].shape[3])


def _groups(step: Step, prompts: Prompts) -> list[Prompts]:
    """Groups of consecutive requests to expand together, within a memory limit for one head."""
    rank, width = step["weight"].shape[1], step["key_cache"].shape[3]
    shared = width - rank
    dim, v_dim = step["query"].shape[2] - shared, _value_dim(step)
    size = step["query"].element_size()
    most = MAX_BYTES // (size * (width + 2 * dim + v_dim + shared))  # tokens
    groups: list[Prompts] = []
    token = prompts.first_token
    for i, (new, context) in enumerate(zip(prompts.lengths, prompts.contexts, strict=True)):
        one = Prompts(
            first_request=prompts.first_request + i,
            first_token=token,
            lengths=(new,),
            contexts=(context,),
        )
        token += new
        sizes = {"dim": dim, "shared": shared, "v_dim": v_dim, "rank": rank, "itemsize": size}
        if step["window"] or step["chunk"] or not expands(new, context, **sizes):
            continue
        before = groups[-1] if groups and groups[-1].end_request == one.first_request else None
        if before is not None and sum(before.contexts) + context <= most:
            groups[-1] = before.followed_by(one)
        else:
            groups.append(one)
    return groups


def _by_head(step: Step) -> Tensor:
    weight: Tensor = step["weight"]
    return weight.view(step["query"].shape[1], -1, weight.shape[1])  # [H, D + Dv, R]


def _bounds(step: Step) -> dict[str, Any]:
    return {name: step[name] for name in ("query_start", "context_len", "scale", "softcap")}


def _absorbed(step: Step) -> Tensor:
    query, key_cache, weight = step["query"], step["key_cache"], _by_head(step)
    tokens, heads, dim = query.shape
    rank, v_dim = weight.shape[2], _value_dim(step)
    split = weight.shape[1] - v_dim
    own = query.new_empty(tokens, heads, key_cache.shape[3])
    into = own[..., :rank].transpose(0, 1)
    torch.bmm(query[..., :split].transpose(0, 1), weight[:, :split], out=into)
    own[..., rank:] = query[..., split:]
    latent = attend(
        query=own, key_cache=key_cache, value_cache=key_cache[..., :0],
        block_table=step["block_table"], window=step["window"], chunk=step["chunk"],
        sinks=step["sinks"], slopes=step["slopes"], k_scale=step["k_scale"], v_dim=rank,
        **_bounds(step),
    )  # fmt: skip
    out: Tensor = query.new_empty(tokens, heads, v_dim)
    turned = weight[:, split:].transpose(1, 2)
    torch.bmm(latent.transpose(0, 1), turned, out=out.transpose(0, 1))
    return out


def _expanded(step: Step, contexts: tuple[int, ...]) -> Tensor:
    """Attend to expanded keys and values of requests with `contexts` tokens each, for as many heads
    at a time as fit in the memory limit."""
    query, key_cache, weight = step["query"], step["key_cache"], _by_head(step)
    heads, v_dim, rank = query.shape[1], _value_dim(step), weight.shape[2]
    split, size = weight.shape[1] - v_dim, key_cache.shape[2]
    counts = [cdiv(context, size) for context in contexts]
    blocks = torch.cat([step["block_table"][r, :n] for r, n in enumerate(counts)]).long()
    pages = read_blocks(
        key_cache, blocks, step["k_scale"], keys=True
    )  # [blocks, block_size, 1, R + Dr]
    cached = pages.to(query.dtype)
    latent, common = cached.split([rank, cached.shape[3] - rank], -1)
    ends = torch.div(step["context_len"] + size - 1, size, rounding_mode="floor").cumsum(0)
    starts = F.pad(ends[:-1], (1, 0))
    table = starts[:, None] + torch.arange(max(counts), device=query.device)
    out: Tensor = query.new_empty(*query.shape[:2], v_dim)
    values = weight.shape[1] + query.shape[2]  # per token and head
    room = MAX_BYTES // query.element_size() - cached.numel()
    most = min(max(room // (len(blocks) * size * values), 1), heads)
    for first in range(0, heads, most):
        some = slice(first, min(first + most, heads))
        made = F.linear(latent[:, :, 0], weight[some].flatten(0, 1))
        made = made.unflatten(2, (-1, weight.shape[1]))  # [blocks, block_size, some, D + Dv]
        key = made.new_empty(*made.shape[:3], query.shape[2])
        key[..., :split], key[..., split:] = made[..., :split], common
        out[:, some] = attend(
            query=query[:, some], key_cache=key.transpose(1, 2),
            value_cache=made[..., split:].transpose(1, 2), block_table=table.int(),
            window=0, chunk=0, sinks=None if step["sinks"] is None else step["sinks"][some],
            slopes=None if step["slopes"] is None else step["slopes"][some], **_bounds(step),
        )  # fmt: skip
    return out


def _supports(
    *,
    query: Tensor,
    weight: Tensor,
    key_cache: Tensor,
    context_len: Tensor,
    k_scale: Tensor | None,
    **others: object,
) -> bool:
    rank, width = weight.shape[1], key_cache.shape[3]
    value_dim = expanded_dim(query.shape[2], query.shape[1], weight, width)
    rows = context_len.shape[0]  # symbolic while a graph is lowered: checked only if it is known
    return (
        supports_tensors(query, weight)
        and same_dtype(query, weight)
        and caches_fit(query, key_cache, key_cache, k_scale, k_scale)
        and key_cache.dtype != torch.int8
        and max(rank, width - rank, query.shape[2], value_dim) <= MAX_HEAD_DIM
        and rank < width
        and (not isinstance(rows, int) or rows <= MAX_REQUESTS)
    )


define(latent_attention, run=_run, supports=_supports)
