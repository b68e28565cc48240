"""`encoder_attention` in Triton: a program handles a tile of a sequence's queries for one head.

The grid depends only on shapes: with R sequences there are at most T / BLOCK_M + R tiles, and each
program finds its own in query_start. Online softmax in base 2 (https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.encoder_attention import encoder_attention
from llmc.kernels.triton.attention_combine import MINUS_INF
from llmc.kernels.triton.attention_kernel import LOG2E
from llmc.kernels.triton.attention_plan import locate
from llmc.kernels.triton.define import (
    define,
    dot_precision,
    needs_upcast,
    same_dtype,
    supports_tensors,
)
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2

_MAX_CHANNELS = 256  # per head: one tile each of query, key and value is kept at a time


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def encoder_attention_kernel(
    query, key, value, query_start, out,
    query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head,
    scale, num_rows, num_tokens,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, ROWS)
    starts = tl.load(query_start + r, mask=r < num_rows, other=0)
    ends = tl.load(query_start + r + 1, mask=r < num_rows, other=0)
    row, tile = locate(tl.program_id(0), (ends - starts + BLOCK_M - 1) // BLOCK_M, ROWS)
    # after the sequences: rows that belong to none, which are set to zero
    is_text = row < num_rows
    row = tl.minimum(row, num_rows)
    first = tl.load(query_start + row)
    last = tl.load(query_start + row + 1, mask=is_text, other=num_tokens)
    if first + tile * BLOCK_M >= last:
        return
    head = tl.program_id(1)
    m = first + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PAD)
    dv = tl.arange(0, V_DIM_PAD)
    tokens = m.to(tl.int64)
    q = tl.load(query + tokens[:, None] * query_token + head * query_head + d[None, :],
                mask=(m < last)[:, None] & (d < DIM)[None, :], other=0)  # fmt: skip
    if UPCAST:
        q = q.to(tl.float32)
    low, high = first, last
    if WINDOW > 0:
        low = tl.maximum(first, first + tile * BLOCK_M - (WINDOW - 1))
        high = tl.minimum(last, first + (tile + 1) * BLOCK_M + WINDOW - 1)
    if not is_text:
        high = low
    highest = tl.full([BLOCK_M], MINUS_INF, tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_DIM_PAD], tl.float32)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < high
        places = n.to(tl.int64)
        k = tl.load(key + places[:, None] * key_token + (head // GROUP) * key_head + d[None, :],
                    mask=live[:, None] & (d < DIM)[None, :], other=0).to(q.dtype)  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        seen = live[None, :]
        if WINDOW > 0:
            distance = m[:, None] - n[None, :]
            seen = seen & (distance < WINDOW) & (distance > -WINDOW)
        s = tl.where(seen, s, MINUS_INF)
        higher = tl.maximum(highest, tl.max(s, axis=1))
        base = tl.where(higher == MINUS_INF, 0.0, higher)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(highest - base)
        v = tl.load(value + places[:, None] * value_token + (head // GROUP) * value_head
                    + dv[None, :],
                    mask=live[:, None] & (dv < V_DIM)[None, :], other=0).to(q.dtype)  # fmt: skip
        norm = norm * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        highest = higher
    result = acc / tl.where(norm == 0, 1.0, norm)[:, None]
    tl.store(out + tokens[:, None] * out_token + head * out_head + dv[None, :],
             result.to(out.dtype.element_ty),
             mask=(m < last)[:, None] & (dv < V_DIM)[None, :])  # fmt: skip


def plan(
    query: Tensor, key: Tensor, value: Tensor, query_start: Tensor, scale: float, window: int
) -> Plan[Tensor]:
    tokens, heads, dim = query.shape
    v_dim, rows = value.shape[2], query_start.shape[0] - 1
    out = query.new_empty(tokens, heads, v_dim)
    widest = max(power_of_2(dim, 16), power_of_2(v_dim, 16))
    wide = query.dtype.itemsize == 4 or widest > 128
    block_m, block_n = (32, 32) if wide else (64, 64)
    upcast = needs_upcast(query.dtype)
    launch = Launch(
        kernel=encoder_attention_kernel,
        grid=(cdiv(tokens, block_m) + rows, heads),
        args={
            "query": query, "key": key, "value": value, "query_start": query_start, "out": out,
            "query_token": query.stride(0), "query_head": query.stride(1),
            "key_token": key.stride(0), "key_head": key.stride(1),
            "value_token": value.stride(0), "value_head": value.stride(1),
            "out_token": out.stride(0), "out_head": out.stride(1),
            "scale": scale, "num_rows": rows, "num_tokens": tokens,
        },
        constants={
            "GROUP": heads // key.shape[1],
            "DIM": dim, "DIM_PAD": power_of_2(dim, 16),
            "V_DIM": v_dim, "V_DIM_PAD": power_of_2(v_dim, 16),
            "WINDOW": window, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "ROWS": power_of_2(rows, 64),
            "PRECISION": dot_precision(query.dtype), "UPCAST": upcast,
        },
        num_warps=4,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def _supports(*, query: Tensor, key: Tensor, value: Tensor, **others: object) -> bool:
    return (
        supports_tensors(query, key, value)
        and same_dtype(query, key, value)
        and max(query.shape[2], value.shape[2]) <= _MAX_CHANNELS
    )


define(encoder_attention, plan=plan, supports=_supports)
