"""`latent_attention` on GPUs: matrix products around our paged attention, in two forms.

    query ─┬─ few new tokens ─ meet the weight ─ attention over latents ─ meets the weight ─┬─ out
           └─ many ─ latents out of their pages ─ weight ─ attention over keys and values ──┘

With up to FUSED_ROWS tokens, the two products around the attention over latents are kernels that
read each head's weight once. With more they are torch's.

The host knows the requests of a step only from a hint, as in `prompt_attention`. Without the hint,
a step reads nothing on the host and can run in a CUDA graph. Expanded keys and values are laid out
as pages again, so that requests of any length are one launch of the same kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.attention import expanded_dim
from llmc.kernels.cache_dtype import caches_fit, read_blocks
from llmc.kernels.latent_attention import LEAST_NEW, MAX_BYTES, expands, latent_attention
from llmc.kernels.prompts import Prompts
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.define import (
    define,
    dot_precision,
    needs_upcast,
    same_dtype,
    supports_tensors,
)
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, interpreted, power_of_2
from llmc.kernels.triton.linear_configs import FUSED_ROWS
from llmc.kernels.triton.paged_attention import MAX_HEAD_DIM, MAX_REQUESTS, attend
from llmc.kernels.triton.prompt_attention import part_of

Step = Mapping[str, Any]  # the op's arguments without the hint
_TILE = 8192  # values of the weight that a program multiplies


@triton.jit
def head_weight(
    weight, tile, head, weight_head, weight_in, weight_out, is_head,
    HEAD_IN: tl.constexpr, HEAD_OUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The weights [BLOCK_K, BLOCK_N] of a tile of a head's outputs; zeros if it `is_head` not."""
    k = tl.arange(0, BLOCK_K)[:, None]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    at = weight + head * weight_head + k * weight_in + n * weight_out
    return tl.load(at, mask=(k < HEAD_IN) & (n < HEAD_OUT) & is_head, other=0.0)


@triton.jit
def multiply_head(
    x_at, w, out_at, tile, m, rows,
    HEAD_IN: tl.constexpr, HEAD_OUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store the tile's outputs for all rows. x_at, out_at: pointers to the head of each row m,
    [BLOCK_M, 1]; w: what `head_weight` gives."""
    k = tl.arange(0, BLOCK_K)[None, :]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    a = tl.load(x_at + k, mask=(m < rows) & (k < HEAD_IN), other=0.0)
    if UPCAST:
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    y = tl.dot(a, w, input_precision=PRECISION)
    tl.store(out_at + n, y.to(out_at.dtype.element_ty), mask=(m < rows) & (n < HEAD_OUT))


@triton.jit(do_not_specialize=["rows"])
def head_product_kernel(
    x, weight, out, rows, x_row, x_head, weight_head, weight_in, weight_out, out_row, out_head,
    HEAD_IN: tl.constexpr, HEAD_OUT: tl.constexpr, COPIED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COPIED_PAD: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one head for all rows. The head's last COPIED inputs follow its outputs as
    they are."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    w = head_weight(weight, tile, head, weight_head, weight_in, weight_out, True, HEAD_IN,
                    HEAD_OUT, BLOCK_N, BLOCK_K)  # fmt: skip
    if PDL:
        wait_for_previous()
    m = tl.arange(0, BLOCK_M)[:, None]
    x_at = x + m.to(tl.int64) * x_row + head * x_head
    out_at = out + m.to(tl.int64) * out_row + head * out_head
    multiply_head(
        x_at, w, out_at, tile, m, rows, HEAD_IN, HEAD_OUT, BLOCK_N, BLOCK_K, PRECISION, UPCAST
    )
    if COPIED:
        c = tl.arange(0, COPIED_PAD)[None, :]
        copied = (m < rows) & (c < COPIED) & (tile == 0)
        tl.store(out_at + HEAD_OUT + c, tl.load(x_at + HEAD_IN + c, mask=copied), mask=copied)


def plan_product(x: Tensor, weight: Tensor, out: Tensor) -> Plan[Tensor]:
    """out[t, h] = x[t, h] times weight[h], for up to FUSED_ROWS tokens.

    x [T, H, K + C], weight [H, K, N] with any strides, out [T, H, N + C]: the last C channels are
    copied.
    """
    args, constants = product_options(x, weight, out)
    copied = x.shape[2] - weight.shape[1]
    pdl = dependent_launch.applies_to(x.device)
    launch = Launch(
        kernel=head_product_kernel,
        grid=(cdiv(weight.shape[2], constants["BLOCK_N"]), weight.shape[0]),
        args=args,
        constants={
            **constants, "COPIED": copied, "COPIED_PAD": power_of_2(copied), "PDL": pdl,
        },
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def product_options(
    x: Tensor, weight: Tensor, out: Tensor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments and constants of a kernel that multiplies by heads, as `plan_product` does."""
    depth, channels = weight.shape[1:]
    block_k = power_of_2(depth, at_least=16)
    block_n = min(power_of_2(channels, at_least=16), max(16, _TILE // block_k))
    args = {
        "x": x, "weight": weight, "out": out, "rows": x.shape[0], "x_row": x.stride(0),
        "x_head": x.stride(1), "weight_head": weight.stride(0), "weight_in": weight.stride(1),
        "weight_out": weight.stride(2), "out_row": out.stride(0), "out_head": out.stride(1),
    }  # fmt: skip
    constants = {
        "HEAD_IN": depth, "HEAD_OUT": channels, "BLOCK_M": FUSED_ROWS, "BLOCK_N": block_n,
        "BLOCK_K": block_k, "PRECISION": dot_precision(x.dtype), "UPCAST": needs_upcast(x.dtype),
    }  # fmt: skip
    return args, constants


def _product(x: Tensor, weight: Tensor, out: Tensor, *, few: bool) -> None:
    if few:
        plan_product(x, weight, out).run()
        return
    depth, channels = weight.shape[1:]
    into = out[..., :channels].transpose(0, 1)
    torch.bmm(x[..., :depth].transpose(0, 1), weight, out=into)
    if x.shape[2] > depth:
        out[..., channels:] = x[..., depth:]


def run(*args: Any) -> Tensor:
    step = latent_attention.bind(args)
    hint = step.pop("prompts")
    query: Tensor = step["query"]
    few = takes(query)  # for all of a step, or for none of its parts
    groups = [] if few or hint is None else _groups(step, Prompts.read(hint))
    if not groups:
        return _absorbed(step, few=few)
    out: Tensor = query.new_zeros(*query.shape[:2], _value_dim(step))
    end = Prompts(first_request=step["context_len"].shape[0], first_token=query.shape[0])
    done = Prompts()
    for group in (*groups, end):
        between = slice(done.end_request, group.first_request)
        tokens = slice(done.end_token, group.first_token)
        if between.stop > between.start and tokens.stop > tokens.start:
            out[tokens] = _absorbed(part_of(step, between, tokens), few=False)
        if group.lengths:
            requests = slice(group.first_request, group.end_request)
            tokens = slice(group.first_token, group.end_token)
            out[tokens] = _expanded(part_of(step, requests, tokens), group.contexts)
        done = group
    return out


def takes(query: Tensor) -> bool:
    """Whether the kernels multiply by the weight: there are too few tokens to expand for any.

    float32 has no tensor cores, without which so large tiles do not fit in registers.
    """
    few = query.shape[0] <= FUSED_ROWS < LEAST_NEW
    return few and (query.element_size() == 2 or interpreted())


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


def by_head(step: Step) -> Tensor:
    weight: Tensor = step["weight"]
    return weight.view(step["query"].shape[1], -1, weight.shape[1])  # [H, D + Dv, R]


def _bounds(step: Step) -> dict[str, Any]:
    return {name: step[name] for name in ("query_start", "context_len", "scale", "softcap")}


def _absorbed(step: Step, *, few: bool) -> Tensor:
    query, key_cache, weight = step["query"], step["key_cache"], by_head(step)
    own = query.new_empty(*query.shape[:2], key_cache.shape[3])
    _product(query, weight[:, : weight.shape[1] - _value_dim(step)], own, few=few)
    return attend_to_latents(own, step, few=few)


def attend_to_latents(own: Tensor, step: Step, *, few: bool) -> Tensor:
    """own [T, H, R + Dr]: queries that met the weight -> [T, H, Dv], the op's result."""
    key_cache, weight, v_dim = step["key_cache"], by_head(step), _value_dim(step)
    rank = weight.shape[2]
    latent = attend(
        query=own, key_cache=key_cache, value_cache=key_cache[..., :0],
        block_table=step["block_table"], window=step["window"], chunk=step["chunk"],
        sinks=step["sinks"], slopes=step["slopes"], k_scale=step["k_scale"], v_dim=rank,
        **_bounds(step),
    )  # fmt: skip
    out: Tensor = own.new_empty(*own.shape[:2], v_dim)
    _product(latent, weight[:, -v_dim:].transpose(1, 2), out, few=few)
    return out


def _expanded(step: Step, contexts: tuple[int, ...]) -> Tensor:
    """Attend to expanded keys and values of requests with `contexts` tokens each, for as many heads
    at a time as fit in the memory limit."""
    query, key_cache, weight = step["query"], step["key_cache"], by_head(step)
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


def supports(
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


define(latent_attention, run=run, supports=supports)
