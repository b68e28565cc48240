"""`rope_write` in Triton: norm, rotation and cache write for a few heads of one token.

The heads of a token form one list: query heads, then key heads, then value heads; a program handles
a few of one kind. A channel's partner in the rotation is loaded a second time instead of shuffled,
since its cache line is already in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.cache_dtype import block_tokens, caches_fit
from llmc.kernels.rope_write import rope_write
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.cached import (
    as_bytes,
    format_constants,
    scales_for,
    slot_scale,
    store_heads,
)
from llmc.kernels.triton.configs import ROPE_ELEMENTS, TOGETHER_ELEMENTS
from llmc.kernels.triton.define import define, same_dtype, supports_tensors
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.write_kv import cache_strides, copy_heads


@triton.jit
def mean_square(row, WIDTH: tl.constexpr, CHUNK: tl.constexpr = 1024):
    """Of the WIDTH channels at `row`, all of which are under way at once."""
    squares = tl.zeros([CHUNK], tl.float32)
    for first in tl.static_range(0, WIDTH, CHUNK):
        at = first + tl.arange(0, CHUNK)
        x = tl.load(row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        squares += x * x
    return tl.sum(squares, axis=0) / WIDTH


@triton.jit
def turn(src, weight, cos, sin, live, eps, offset, NORM: tl.constexpr,
         DIM: tl.constexpr, DIM_PAD: tl.constexpr, WIDTH: tl.constexpr,
         INTERLEAVED: tl.constexpr, NORM_LAST: tl.constexpr = False, mean=None):  # fmt: skip
    """Normalized and rotated heads [HEADS, DIM_PAD] in float32.

    NORM: how many channels are normalized together, or 0: those of a head, or of all heads. Then
    `mean`, for all or [HEADS, 1], is that of their squares, and weight [HEADS, 1] points to those
    of each head.
    NORM_LAST: normalized after the rotation. src [HEADS, 1]: pointers to them; live [HEADS, 1]:
    whether to read them. cos, sin: pointers to the row for all heads, or [HEADS, 1].
    """
    d = tl.arange(0, DIM_PAD)
    x = tl.load(src + d[None, :], mask=live & (d < DIM)[None, :], other=0.0).to(tl.float32)
    if WIDTH > 0:
        if INTERLEAVED:
            partner = tl.where(d % 2 == 0, d + 1, d - 1)
            sign = tl.where(d % 2 == 0, -1.0, 1.0)
        else:
            partner = tl.where(d < WIDTH // 2, d + WIDTH // 2, d - WIDTH // 2)
            sign = tl.where(d < WIDTH // 2, -1.0, 1.0)
        turned = d < WIDTH
        y = tl.load(src + partner[None, :], mask=live & turned[None, :], other=0.0).to(tl.float32)
    if NORM > DIM:
        inverse = 1 / tl.sqrt_rn(mean + eps)
        w = tl.load(weight + d[None, :], mask=live & (d < DIM)[None, :], other=0.0)
        x = x * inverse * (w.to(tl.float32) + offset)
        if WIDTH > 0:
            w = tl.load(weight + partner[None, :], mask=live & turned[None, :], other=0.0)
            y = y * inverse * (w.to(tl.float32) + offset)
    elif NORM:
        w = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32) + offset
    if NORM == DIM and not NORM_LAST:
        inverse = 1 / tl.sqrt_rn(tl.sum(x * x, axis=1) / DIM + eps)
        x = x * inverse[:, None] * w[None, :]
        if WIDTH > 0:
            w_partner = tl.load(weight + partner, mask=turned, other=0.0).to(tl.float32) + offset
            y = y * inverse[:, None] * w_partner[None, :]
    if WIDTH > 0:
        c = tl.load(cos + d[None, :], mask=turned[None, :], other=1.0)
        s = tl.load(sin + d[None, :], mask=turned[None, :], other=0.0) * sign[None, :]
        x = x * c + y * s
    if NORM == DIM and NORM_LAST:
        x *= 1 / tl.sqrt_rn(tl.sum(x * x, axis=1) / DIM + eps)[:, None] * w[None, :]
    return x


@triton.jit
def rope_write_kernel(
    query, key, value, out, query_norm, key_norm, cos_table, sin_table, positions,
    key_cache, value_cache, slots, k_scale, v_scale,
    query_token, query_head, key_token, key_head, value_token, value_head,
    cos_row, sin_row, kc_block, kc_head, kc_slot, vc_block, vc_head, vc_slot, eps, offset,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr, KV_BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr,
    WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr, NORM_LAST: tl.constexpr,
    FORMAT: tl.constexpr, K_SCALE_STRIDE: tl.constexpr, V_SCALE_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    d = tl.arange(0, DIM_PAD)
    position = tl.load(positions + token).to(tl.int64)
    cos = cos_table + position * cos_row
    sin = sin_table + position * sin_row
    if part < QUERY_BLOCKS:
        head = part * HEADS + tl.arange(0, HEADS)
        row = query + token * query_token
        mean, weight = None, query_norm
        if QUERY_NORM > DIM:
            mean, weight = mean_square(row, QUERY_NORM), query_norm + head[:, None] * DIM
        x = turn(row + head[:, None] * query_head, weight, cos, sin,
                 (head < QUERY_HEADS)[:, None], eps, offset, QUERY_NORM, DIM, DIM_PAD, WIDTH,
                 INTERLEAVED, NORM_LAST, mean)  # fmt: skip
        tl.store(
            out + (token * QUERY_HEADS + head[:, None]) * DIM + d[None, :],
            x.to(out.dtype.element_ty),
            mask=(head < QUERY_HEADS)[:, None] & (d < DIM)[None, :],
        )
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            inside = slot % BLOCK_SIZE
            if part < QUERY_BLOCKS + KV_BLOCKS:
                head = (part - QUERY_BLOCKS) * HEADS + tl.arange(0, HEADS)
                row = key + token * key_token
                mean, weight = None, key_norm
                if KEY_NORM > DIM:
                    mean, weight = mean_square(row, KEY_NORM), key_norm + head[:, None] * DIM
                x = turn(row + head[:, None] * key_head, weight, cos, sin,
                         (head < KV_HEADS)[:, None], eps, offset, KEY_NORM, DIM, DIM_PAD, WIDTH,
                         INTERLEAVED, NORM_LAST, mean)  # fmt: skip
                place = key_cache + block * kc_block + inside * kc_slot
                head = head[:, None]
                store_heads(
                    place + head * kc_head + d[None, :],
                    x,
                    slot_scale(k_scale, block, inside, kc_block, kc_slot, BLOCK_SIZE, FORMAT),
                    head,
                    KV_HEADS,
                    kc_head,
                    (head < KV_HEADS) & (d < DIM)[None, :],
                    DIM,
                    K_SCALE_STRIDE,
                    FORMAT,
                    True,
                )
            else:
                copy_heads(value + token * value_token,
                           value_cache + block * vc_block + inside * vc_slot,
                           value_head, vc_head, KV_HEADS,
                           slot_scale(v_scale, block, inside, vc_block, vc_slot, BLOCK_SIZE,
                                      FORMAT),
                           HEADS, V_DIM, V_DIM_PAD,
                           FORMAT, V_SCALE_STRIDE, False,
                           (part - QUERY_BLOCKS - KV_BLOCKS) * HEADS)  # fmt: skip


def normed_together(weight: Tensor | None) -> int:
    """How many channels a norm divides by one number; 0 if there is no norm."""
    return 0 if weight is None else weight.shape[0]


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    norm_offset: float,
    cos_table: Tensor,
    sin_table: Tensor,
    positions: Tensor,
    interleaved: bool,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    norm_last: bool = False,
) -> Plan[Tensor]:
    tokens, query_heads, dim = query.shape
    kv_heads, v_dim = value.shape[1:]
    widest = power_of_2(max(dim, v_dim))
    norms = {"QUERY_NORM": normed_together(query_norm), "KEY_NORM": normed_together(key_norm)}
    if max(norms.values()) > dim:  # a program reads the whole row, so it computes most of its heads
        heads, num_warps = min(power_of_2(query_heads), max(1, TOGETHER_ELEMENTS // widest)), 8
    else:
        heads, num_warps = min(power_of_2(kv_heads), max(1, ROPE_ELEMENTS // widest)), 4
    query_blocks, kv_blocks = cdiv(query_heads, heads), cdiv(kv_heads, heads)
    pdl = dependent_launch.applies_to(query.device)
    out = query.new_empty(query.shape)
    launch = Launch(
        kernel=rope_write_kernel,
        grid=(tokens, query_blocks + 2 * kv_blocks),
        args={
            "query": query, "key": key, "value": value, "out": out,
            "query_norm": query_norm, "key_norm": key_norm,
            "cos_table": cos_table, "sin_table": sin_table, "positions": positions,
            "key_cache": as_bytes(key_cache), "value_cache": as_bytes(value_cache),
            "slots": slot_mapping, "k_scale": scales_for(key_cache, k_scale),
            "v_scale": scales_for(value_cache, v_scale),
            "query_token": query.stride(0), "query_head": query.stride(1),
            "key_token": key.stride(0), "key_head": key.stride(1),
            "value_token": value.stride(0), "value_head": value.stride(1),
            "cos_row": cos_table.stride(0), "sin_row": sin_table.stride(0),
            **cache_strides(key_cache, value_cache), "eps": eps, "offset": norm_offset,
        },
        constants={
            "QUERY_HEADS": query_heads, "KV_HEADS": kv_heads, "HEADS": heads,
            "QUERY_BLOCKS": query_blocks, "KV_BLOCKS": kv_blocks,
            "BLOCK_SIZE": block_tokens(key_cache),
            "DIM": dim, "DIM_PAD": power_of_2(dim), "V_DIM": v_dim, "V_DIM_PAD": power_of_2(v_dim),
            "WIDTH": cos_table.shape[-1], "INTERLEAVED": interleaved,
            **norms, "NORM_LAST": norm_last,
            **format_constants(key_cache, k_scale, v_scale), "PDL": pdl,
        },
        num_warps=num_warps,
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def supports(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos_table: Tensor,
    sin_table: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    norm_last: bool,
    **others: object,
) -> bool:
    dim = query.shape[2]
    # all heads of a token are read as one row
    together = [
        heads
        for heads, norm in ((query, query_norm), (key, key_norm))
        if normed_together(norm) > dim
    ]
    return (
        supports_tensors(query, key, value, query_norm, key_norm, cos_table, sin_table)
        and caches_fit(query, key_cache, value_cache, k_scale, v_scale)
        and same_dtype(query, key, value)
        and same_dtype(cos_table, sin_table)
        and cos_table.dtype.itemsize == 4
        and positions.is_contiguous()
        and slot_mapping.is_contiguous()
        and all(heads.stride(1) == dim for heads in together)
        and not (together and norm_last)
    )


define(rope_write, plan=plan, supports=supports)
