"""`write_kv` in Triton: a program copies keys and values of some heads of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.cache_dtype import block_tokens, caches_fit
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.cached import (
    as_bytes,
    format_constants,
    scales_for,
    slot_scale,
    store_heads,
)
from llmc.kernels.triton.configs import WRITE_ELEMENTS
from llmc.kernels.triton.define import define, supports_tensors
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.write_kv import write_kv


@triton.jit
def copy_heads(src, dst, src_head, dst_head, heads, scale, HEADS: tl.constexpr, DIM: tl.constexpr,
               DIM_PAD: tl.constexpr, FORMAT: tl.constexpr, SCALE_STRIDE: tl.constexpr,
               KEYS: tl.constexpr, head0):  # fmt: skip
    """Copy HEADS heads of src [heads, DIM] from head0 on to dst, a slot with `scale`."""
    head = head0 + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, DIM_PAD)[None, :]
    mask = (head < heads) & (d < DIM)
    x = tl.load(src + head * src_head + d, mask=mask)
    store_heads(dst + head * dst_head + d, x, scale, head, heads, dst_head, mask, DIM,
                SCALE_STRIDE, FORMAT, KEYS)  # fmt: skip


@triton.jit
def write_kv_kernel(
    key, value, key_cache, value_cache, slots, k_scale, v_scale,
    key_token, key_head, value_token, value_head,
    kc_block, kc_head, kc_slot, vc_block, vc_head, vc_slot,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr,
    FORMAT: tl.constexpr, K_SCALE_STRIDE: tl.constexpr, V_SCALE_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    head0 = tl.program_id(1) * HEADS
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        key_scale = slot_scale(k_scale, block, offset, kc_block, kc_slot, BLOCK_SIZE, FORMAT)
        value_scale = slot_scale(v_scale, block, offset, vc_block, vc_slot, BLOCK_SIZE, FORMAT)
        copy_heads(key + token * key_token, key_cache + block * kc_block + offset * kc_slot,
                   key_head, kc_head, KV_HEADS, key_scale, HEADS, DIM, DIM_PAD, FORMAT,
                   K_SCALE_STRIDE, True, head0)  # fmt: skip
        copy_heads(value + token * value_token, value_cache + block * vc_block + offset * vc_slot,
                   value_head, vc_head, KV_HEADS, value_scale, HEADS, V_DIM, V_DIM_PAD, FORMAT,
                   V_SCALE_STRIDE, False, head0)  # fmt: skip


def cache_strides(key_cache: Tensor, value_cache: Tensor) -> dict[str, int]:
    return {
        f"{name}_{axis}": cache.stride(i)
        for name, cache in (("kc", key_cache), ("vc", value_cache))
        for i, axis in enumerate(("block", "head", "slot"))
    }


def plan(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Plan[None]:
    tokens, kv_heads, dim = key.shape
    v_dim = value.shape[2]
    widest = power_of_2(max(dim, v_dim))
    heads = min(power_of_2(kv_heads), max(1, WRITE_ELEMENTS // widest))
    pdl = dependent_launch.applies_to(key.device)
    return Plan(
        out=None,
        launches=(
            Launch(
                kernel=write_kv_kernel,
                grid=(tokens, cdiv(kv_heads, heads)),
                args={
                    "key": key, "value": value, "key_cache": as_bytes(key_cache),
                    "value_cache": as_bytes(value_cache), "slots": slot_mapping,
                    "k_scale": scales_for(key_cache, k_scale),
                    "v_scale": scales_for(value_cache, v_scale),
                    "key_token": key.stride(0), "key_head": key.stride(1),
                    "value_token": value.stride(0), "value_head": value.stride(1),
                    **cache_strides(key_cache, value_cache),
                },
                constants={
                    "BLOCK_SIZE": block_tokens(key_cache), "KV_HEADS": kv_heads, "HEADS": heads,
                    "DIM": dim, "DIM_PAD": power_of_2(dim),
                    "V_DIM": v_dim, "V_DIM_PAD": power_of_2(v_dim),
                    **format_constants(key_cache, k_scale, v_scale), "PDL": pdl,
                },
                pdl=pdl,
            ),
        ),
    )  # fmt: skip


def _supports(
    *,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> bool:
    return (
        supports_tensors(key, value)
        and caches_fit(key, key_cache, value_cache, k_scale, v_scale)
        and slot_mapping.is_contiguous()
    )


define(write_kv, plan=plan, supports=_supports)
