"""`rope_write_latent` in Triton: programs of a token rotate some query heads, or write the key."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.cache_dtype import block_tokens, caches_fit
from llmc.kernels.rope_write_latent import rope_write_latent
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.cached import as_bytes, format_constants, scales_for, store_heads
from llmc.kernels.triton.configs import ROPE_ELEMENTS
from llmc.kernels.triton.define import define, same_dtype, supports_tensors
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.rope_write import turn


@triton.jit
def write_latent_key(
    token, latent, shared, norm, cos, sin, key_cache, slots, k_scale, latent_token, shared_token,
    kc_block, kc_slot, eps, offset,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr,
    K_SCALE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Write a token's latent, normalized if there is a NORM, and its rotated shared channels.
    cos, sin: pointers to the row of the token's position."""
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        place = key_cache + slot // BLOCK_SIZE * kc_block + slot % BLOCK_SIZE * kc_slot
        head = tl.arange(0, 1)[:, None]
        i = tl.arange(0, RANK_PAD)[None, :]
        r = tl.arange(0, WIDTH_PAD)[None, :]
        known = (i < RANK) & (head < 1)
        x = tl.load(latent + token * latent_token + i, mask=known, other=0.0).to(tl.float32)
        if NORM:
            weight = tl.load(norm + i, mask=known, other=0.0).to(tl.float32) + offset
            x *= weight / tl.sqrt_rn(tl.sum(x * x, axis=1)[:, None] / RANK + eps)
        store_heads(place + i, x, k_scale, head, 1, 0, known, RANK, K_SCALE_STRIDE, FORMAT, True)
        y = turn(shared + token * shared_token + head, None, cos, sin, head < 1, eps, offset,
                 0, WIDTH, WIDTH_PAD, WIDTH, INTERLEAVED)  # fmt: skip
        store_heads(place + RANK + r, y, k_scale, head, 1, 0, (r < WIDTH) & (head < 1), WIDTH,
                    K_SCALE_STRIDE, FORMAT, True)  # fmt: skip


@triton.jit
def rope_write_latent_kernel(
    query, latent, shared, out, norm, cos_table, sin_table, positions, key_cache, slots, k_scale,
    query_token, query_head, latent_token, shared_token, cos_row, sin_row, kc_block, kc_slot, eps,
    offset,
    QUERY_HEADS: tl.constexpr, HEADS: tl.constexpr, QUERY_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, RANK: tl.constexpr,
    RANK_PAD: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr,
    K_SCALE_STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """DIM: channels of a query head that are not rotated."""
    if PDL:
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    r = tl.arange(0, WIDTH_PAD)[None, :]
    position = tl.load(positions + token).to(tl.int64)
    cos = cos_table + position * cos_row
    sin = sin_table + position * sin_row
    if part < QUERY_BLOCKS:
        d = tl.arange(0, DIM_PAD)[None, :]
        head = (part * HEADS + tl.arange(0, HEADS))[:, None]
        live = head < QUERY_HEADS
        src = query + token * query_token + head * query_head
        dst = out + (token * QUERY_HEADS + head) * (DIM + WIDTH)
        plain = live & (d < DIM)
        tl.store(dst + d, tl.load(src + d, mask=plain), mask=plain)
        x = turn(src + DIM, None, cos, sin, live, eps, offset, 0, WIDTH, WIDTH_PAD, WIDTH,
                 INTERLEAVED)  # fmt: skip
        tl.store(dst + DIM + r, x.to(out.dtype.element_ty), mask=live & (r < WIDTH))
    else:
        write_latent_key(
            token, latent, shared, norm, cos, sin, key_cache, slots, k_scale, latent_token,
            shared_token, kc_block, kc_slot, eps, offset, BLOCK_SIZE, RANK, RANK_PAD, WIDTH,
            WIDTH_PAD, INTERLEAVED, NORM, FORMAT, K_SCALE_STRIDE,
        )  # fmt: skip


def plan(
    query: Tensor, latent: Tensor, shared: Tensor, latent_norm: Tensor | None, eps: float,
    norm_offset: float, cos_table: Tensor, sin_table: Tensor, positions: Tensor, interleaved: bool,
    key_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None = None,
) -> Plan[Tensor]:  # fmt: skip
    tokens, query_heads, dim = query.shape
    width = shared.shape[1]
    heads = min(power_of_2(query_heads), max(1, ROPE_ELEMENTS // power_of_2(dim)))
    query_blocks = cdiv(query_heads, heads)
    pdl = dependent_launch.applies_to(query.device)
    out = query.new_empty(query.shape)
    args, constants = key_options(
        latent, shared, latent_norm, eps, norm_offset, cos_table, sin_table, positions, interleaved,
        key_cache, slot_mapping, k_scale,
    )  # fmt: skip
    launch = Launch(
        kernel=rope_write_latent_kernel,
        grid=(tokens, query_blocks + 1),
        args={
            **args, "query": query, "out": out, "query_token": query.stride(0),
            "query_head": query.stride(1),
        },
        constants={
            **constants, "QUERY_HEADS": query_heads, "HEADS": heads, "QUERY_BLOCKS": query_blocks,
            "DIM": dim - width, "DIM_PAD": power_of_2(dim - width), "PDL": pdl,
        },
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def key_options(
    latent: Tensor, shared: Tensor, latent_norm: Tensor | None, eps: float, norm_offset: float,
    cos_table: Tensor, sin_table: Tensor, positions: Tensor, interleaved: bool, key_cache: Tensor,
    slot_mapping: Tensor, k_scale: Tensor | None,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """The arguments and constants of a kernel that calls `write_latent_key`."""
    rank, width = latent.shape[1], shared.shape[1]
    formats = format_constants(key_cache, k_scale, None)
    args = {
        "latent": latent, "shared": shared, "norm": latent_norm, "cos_table": cos_table,
        "sin_table": sin_table, "positions": positions, "key_cache": as_bytes(key_cache),
        "slots": slot_mapping, "k_scale": scales_for(key_cache, k_scale),
        "latent_token": latent.stride(0), "shared_token": shared.stride(0),
        "cos_row": cos_table.stride(0), "sin_row": sin_table.stride(0),
        "kc_block": key_cache.stride(0), "kc_slot": key_cache.stride(2), "eps": eps,
        "offset": norm_offset,
    }  # fmt: skip
    constants = {
        "BLOCK_SIZE": block_tokens(key_cache), "RANK": rank, "RANK_PAD": power_of_2(rank),
        "WIDTH": width, "WIDTH_PAD": power_of_2(width), "INTERLEAVED": interleaved,
        "NORM": latent_norm is not None, "FORMAT": formats["FORMAT"],
        "K_SCALE_STRIDE": formats["K_SCALE_STRIDE"],
    }  # fmt: skip
    return args, constants


def supports(
    *, query: Tensor, latent: Tensor, shared: Tensor, latent_norm: Tensor | None,
    cos_table: Tensor, sin_table: Tensor, positions: Tensor, key_cache: Tensor,
    slot_mapping: Tensor, k_scale: Tensor | None, **others: object,
) -> bool:  # fmt: skip
    return (
        supports_tensors(query, latent, shared, latent_norm, cos_table, sin_table)
        and caches_fit(query, key_cache, key_cache, k_scale, k_scale)
        and key_cache.dtype != torch.int8
        and same_dtype(query, latent, shared)
        and same_dtype(cos_table, sin_table)
        and cos_table.dtype.itemsize == 4
        and positions.is_contiguous()
        and slot_mapping.is_contiguous()
    )


define(rope_write_latent, plan=plan, supports=supports)
