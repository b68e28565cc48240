"""`choose_keys` in Triton: scores all tokens of the contexts, then calls torch's topk.

A kernel turns scores into integers that sort by score and then by earlier token, so that there are
no ties and the result of topk is unique. Launches and sizes depend only on shapes, and nothing is
read back to the host, so the op can run in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.choose_keys import choose_keys
from llmc.kernels.triton import write_kv
from llmc.kernels.triton.attention_plan import request_of
from llmc.kernels.triton.configs import rows_capacity
from llmc.kernels.triton.define import (
    define,
    dot_precision,
    needs_upcast,
    same_dtype,
    supports_tensors,
)
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2

_MAX_HEAD_DIM = 256
_MAX_HEADS = 128
_MAX_REQUESTS = 16384
_BLOCK_N = 64
_RANK_BYTES = 32 << 20  # memory for the ranks that are kept at a time
_LATER = -(1 << 63)  # the rank of keys that a token does not see: below every score
_PLACE = 0xFFFFFFFF


@triton.jit
def rank_of(score, place):
    """An int64 that sorts by float32 score, then by lower place."""
    score = tl.where(score == 0, 0.0, score)  # -0 ranks as 0
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - place.to(tl.int64))


@triton.jit(do_not_specialize=["first_token", "num_rows", "num_keys", "table_row"])
def rank_kernel(
    query, weights, key_cache, query_start, context_len, block_table, ranks,
    query_token, query_head, weight_token, kc_block, kc_slot, table_row,
    first_token, num_rows, num_keys,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, RATE: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Writes ranks [tokens, num_keys] of some tokens, from first_token on."""
    token = first_token + tl.program_id(0)
    row, position = request_of(token, query_start, context_len, num_rows, ROWS)
    position = (position + 1) // RATE - 1  # index of the last visible key
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.full([BLOCK_N], -(1 << 63), tl.int64)
    if tl.program_id(1) * BLOCK_N <= position:
        live = n <= position
        table = block_table + row.to(tl.int64) * table_row
        blocks = tl.load(table + n // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        h = tl.arange(0, HEADS_PAD)
        d = tl.arange(0, DIM_PAD)
        q = tl.load(
            query + token.to(tl.int64) * query_token + h[:, None] * query_head + d[None, :],
            mask=(h < HEADS)[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        at_key = blocks * kc_block + (n % BLOCK_SIZE) * kc_slot
        k = tl.load(
            key_cache + at_key[:, None] + d[None, :],
            mask=live[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)
            k = k.to(tl.float32)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weight = tl.load(weights + token.to(tl.int64) * weight_token + h, mask=h < HEADS, other=0.0)
        score = tl.sum(tl.maximum(product, 0.0) * weight[:, None], axis=0)
        rank = tl.where(live, rank_of(score, n), rank)
    tl.store(ranks + tl.program_id(0).to(tl.int64) * num_keys + n, rank, mask=n < num_keys)


def plan_ranks(
    query: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    first: int,
    count: int,
    rate: int = 1,
) -> Plan[Tensor]:
    """Ranks [count, keys] int64 of tokens from `first` on, over the longest possible context."""
    _, heads, dim = query.shape
    block_size, rows = key_cache.shape[2], context_len.shape[0]
    num_keys = block_table.shape[1] * block_size
    ranks = torch.empty(count, num_keys, dtype=torch.int64, device=query.device)
    launch = Launch(
        kernel=rank_kernel,
        grid=(count, cdiv(num_keys, _BLOCK_N)),
        args={
            "query": query, "weights": weights, "key_cache": key_cache,
            "query_start": query_start, "context_len": context_len, "block_table": block_table,
            "ranks": ranks, "query_token": query.stride(0), "query_head": query.stride(1),
            "weight_token": weights.stride(0), "kc_block": key_cache.stride(0),
            "kc_slot": key_cache.stride(2), "table_row": block_table.stride(0),
            "first_token": first, "num_rows": rows, "num_keys": num_keys,
        },
        constants={
            "HEADS": heads, "HEADS_PAD": power_of_2(heads, 16),
            "DIM": dim, "DIM_PAD": power_of_2(dim, 16),
            "BLOCK_SIZE": block_size, "BLOCK_N": _BLOCK_N, "ROWS": rows_capacity(rows),
            "RATE": rate,
            "PRECISION": dot_precision(query.dtype),
            "UPCAST": needs_upcast(query.dtype),
        },
    )  # fmt: skip
    return Plan(out=ranks, launches=(launch,))


def best_places(ranks: Tensor, k: int) -> Tensor:
    """ranks [N, M] -> indices of each row's k highest [N, k], in ascending order, then -1."""
    num = ranks.shape[1]
    best = ranks.topk(k, dim=1).values
    places = torch.where(best == _LATER, num, _PLACE - (best & _PLACE))
    places = places.sort(dim=1).values
    return torch.where(places == num, -1, places)


def rows_at_once(num: int) -> int:
    """How many rows of `num` ranks are kept at a time."""
    return max(1, _RANK_BYTES // (8 * max(num, 1)))


def write_keys(key: Tensor, key_cache: Tensor, slot_mapping: Tensor) -> None:
    one_head = key[:, None]
    # there are no values: the keys are written twice
    write_kv.plan(one_head, one_head, key_cache, key_cache, slot_mapping).run()


def _run(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    top_k: int,
    rate: int = 1,
) -> Tensor:
    write_keys(key, key_cache, slot_mapping)
    tokens, num_keys = query.shape[0], block_table.shape[1] * key_cache.shape[2]
    out = torch.full((tokens, top_k), -1, dtype=torch.int32, device=query.device)
    count = rows_at_once(num_keys)
    k = min(top_k, num_keys)
    for first in range(0, tokens, count):
        some = min(count, tokens - first)
        ranks = plan_ranks(
            query, weights, key_cache, query_start, context_len, block_table, first, some, rate
        ).run()
        out[first : first + some, :k] = best_places(ranks, k)
    return out


def _supports(*, weights: Tensor, **others: Any) -> bool:
    return supports_tensors(weights) and weights.dtype == torch.float32 and takes_indexer(**others)


def takes_indexer(
    *,
    query: Tensor,
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    context_len: Tensor,
    **others: object,
) -> bool:
    rows = context_len.shape[0]
    return (
        supports_tensors(query, key, key_cache)
        and same_dtype(query, key, key_cache)
        and slot_mapping.is_contiguous()
        and query.shape[1] <= _MAX_HEADS
        and query.shape[2] <= _MAX_HEAD_DIM
        and (not isinstance(rows, int) or rows <= _MAX_REQUESTS)
    )


define(choose_keys, run=_run, supports=_supports)
