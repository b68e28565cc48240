"""`paged_attention` to chosen positions, in Triton: one program per query and tile of a KV head's
query heads.

Every key has its own address, as with pages of one key. A query's keys are not split over programs:
their number is the number of chosen keys, whatever the context.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.attention_combine import MINUS_INF
from llmc.kernels.triton.attention_kernel import LOG2E, load_tile, tanh
from llmc.kernels.triton.attention_plan import request_of
from llmc.kernels.triton.cached import as_bytes, format_constants
from llmc.kernels.triton.configs import attention_config, rows_capacity
from llmc.kernels.triton.define import dot_precision, needs_upcast, token_stride
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.fp8 import converts
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.write_kv import cache_strides

_GROUP_TILE = 16  # heads per program: the minimum for tl.dot


@triton.jit(do_not_specialize=["num_rows", "table_row"])
def chosen_kernel(
    query, key_cache, value_cache, query_start, context_len, block_table, chosen, sinks,
    k_scale, v_scale, out,
    query_token, query_head, sinks_token, out_token, out_head, chosen_token, chosen_group,
    kc_block, kc_head, kc_slot, vc_block, vc_head, vc_slot, table_row,
    scale, softcap, num_rows,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, GROUP_TILES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr, SPARSE_BLOCK: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    K_SCALE_STRIDE: tl.constexpr, V_SCALE_STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_previous()
    token = tl.program_id(0)
    kv_head = tl.program_id(1) // GROUP_TILES
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head * K_SCALE_STRIDE)
    row, position = request_of(token, query_start, context_len, num_rows, ROWS)
    group_head = (tl.program_id(1) % GROUP_TILES) * GROUP_TILE + tl.arange(0, GROUP_TILE)
    valid = group_head < GROUP
    head = kv_head * GROUP + group_head
    d = tl.arange(0, DIM_PAD)
    q = tl.load(
        query + token.to(tl.int64) * query_token + head[:, None] * query_head + d[None, :],
        mask=valid[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    m = tl.full([GROUP_TILE], MINUS_INF, tl.float32)
    norm = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, V_DIM_PAD], tl.float32)
    if SINKS:
        at_sink = token.to(tl.int64) * sinks_token + head
        m = tl.load(sinks + at_sink, mask=valid, other=0.0).to(tl.float32) * LOG2E
        norm += 1.0
    table = block_table + row.to(tl.int64) * table_row
    numbers = chosen + token.to(tl.int64) * chosen_token + kv_head * chosen_group
    keys_of_head = key_cache + kv_head.to(tl.int64) * kc_head
    values_of_head = value_cache + kv_head.to(tl.int64) * vc_head
    for start in tl.range(0, tl.where(position < 0, 0, NUM_CHOSEN * SPARSE_BLOCK), BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)
        number = tl.load(numbers + i // SPARSE_BLOCK, mask=i < NUM_CHOSEN * SPARSE_BLOCK, other=-1)
        n = number * SPARSE_BLOCK + i % SPARSE_BLOCK
        live = (number >= 0) & (n <= position)
        blocks = tl.load(table + n // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        inside = n % BLOCK_SIZE
        k = load_tile(keys_of_head, blocks, inside, kc_block, kc_slot, live, q.dtype,
                      DIM, DIM_PAD, True, FORMAT, NATIVE)  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            s = softcap * tanh(s / softcap)
        s = tl.where(live[None, :], s * LOG2E, MINUS_INF)
        higher = tl.maximum(m, tl.max(s, axis=1))
        base = tl.where(higher == MINUS_INF, 0.0, higher)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(m - base)
        norm = norm * fade + tl.sum(p, axis=1)
        v = load_tile(values_of_head, blocks, inside, vc_block, vc_slot, live, q.dtype,
                      V_DIM, V_DIM_PAD, True, FORMAT, NATIVE)  # fmt: skip
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = higher
    if v_scale is not None:
        acc *= tl.load(v_scale + kv_head * V_SCALE_STRIDE)
    dv = tl.arange(0, V_DIM_PAD)
    result = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    tl.store(
        out + token.to(tl.int64) * out_token + head[:, None] * out_head + dv[None, :],
        result.to(out.dtype.element_ty),
        mask=valid[:, None] & (dv < V_DIM)[None, :],
    )


def plan(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    chosen: Tensor,
    sparse_block_size: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Plan[Tensor]:
    """Arguments as in `paged_attention`."""
    tokens, heads, dim = query.shape
    kv_heads, block_size, v_dim = key_cache.shape[1], key_cache.shape[2], value_cache.shape[3]
    group, rows = heads // kv_heads, context_len.shape[0]
    group_tiles = cdiv(group, _GROUP_TILE)
    dim_pad, v_dim_pad = power_of_2(dim, 16), power_of_2(v_dim, 16)
    # by the rule: what was measured are options of another kernel
    config = attention_config.rule(
        _GROUP_TILE, max(dim_pad, v_dim_pad), query.element_size(), key_cache.element_size(), False
    )
    pdl = dependent_launch.applies_to(query.device)
    out = query.new_empty(tokens, heads, v_dim)
    constants: dict[str, Any] = {
        "GROUP": group, "GROUP_TILE": _GROUP_TILE, "GROUP_TILES": group_tiles,
        "BLOCK_SIZE": block_size, "NUM_CHOSEN": chosen.shape[2], "SPARSE_BLOCK": sparse_block_size,
        "DIM": dim, "DIM_PAD": dim_pad, "V_DIM": v_dim, "V_DIM_PAD": v_dim_pad,
        "BLOCK_N": config.block_n, "ROWS": rows_capacity(rows),
        "SOFTCAP": softcap > 0, "SINKS": sinks is not None,
        "PRECISION": dot_precision(query.dtype),
        "UPCAST": needs_upcast(query.dtype), "NATIVE": converts(query.device),
        **format_constants(key_cache, k_scale, v_scale), "PDL": pdl,
    }  # fmt: skip
    launch = Launch(
        kernel=chosen_kernel,
        grid=(tokens, kv_heads * group_tiles),
        args={
            "query": query, "key_cache": as_bytes(key_cache), "value_cache": as_bytes(value_cache),
            "query_start": query_start, "context_len": context_len, "block_table": block_table,
            "chosen": chosen, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "out": out,
            "query_token": query.stride(0), "query_head": query.stride(1),
            "sinks_token": token_stride(sinks),
            "out_token": out.stride(0), "out_head": out.stride(1),
            "chosen_token": chosen.stride(0),
            "chosen_group": chosen.stride(1) if chosen.shape[1] > 1 else 0,
            **cache_strides(key_cache, value_cache),
            "table_row": block_table.stride(0), "scale": scale, "softcap": softcap,
            "num_rows": rows,
        },
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))
