"""`choose_blocks` in Triton: scores all sparse blocks of a context, then calls torch's topk.

It ranks like `choose_keys`, but ranks are of blocks, with one row for each head of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.choose_blocks import choose_blocks
from llmc.kernels.triton.attention_plan import request_of
from llmc.kernels.triton.choose_keys import (
    best_places,
    rank_of,
    rows_at_once,
    takes_indexer,
    write_keys,
)
from llmc.kernels.triton.configs import rows_capacity
from llmc.kernels.triton.define import define, dot_precision, needs_upcast
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2

_MAX_KEYS = 64  # per tile


@triton.jit(do_not_specialize=["first_token", "num_rows", "num_blocks", "table_row"])
def block_rank_kernel(
    query, key_cache, query_start, context_len, block_table, ranks,
    query_token, query_head, kc_block, kc_slot, table_row,
    first_token, num_rows, num_blocks,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPARSE_BLOCK: tl.constexpr, RECENT: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Writes ranks [tokens, HEADS, num_blocks] of some tokens, from first_token on."""
    token = first_token + tl.program_id(0)
    number = tl.program_id(1)
    row, position = request_of(token, query_start, context_len, num_rows, ROWS)
    h = tl.arange(0, HEADS_PAD)
    rank = tl.full([HEADS_PAD], -(1 << 63), tl.int64)
    if number * SPARSE_BLOCK <= position:
        table = block_table + row.to(tl.int64) * table_row
        d = tl.arange(0, DIM_PAD)
        q = tl.load(
            query + token.to(tl.int64) * query_token + h[:, None] * query_head + d[None, :],
            mask=(h < HEADS)[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)
        most = tl.full([HEADS_PAD], float("-inf"), tl.float32)
        for start in tl.static_range(0, SPARSE_BLOCK, BLOCK_N):
            i = start + tl.arange(0, BLOCK_N)
            n = number * SPARSE_BLOCK + i
            live = (n <= position) & (i < SPARSE_BLOCK)
            blocks = tl.load(table + n // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            at_key = blocks * kc_block + (n % BLOCK_SIZE) * kc_slot
            k = tl.load(
                key_cache + at_key[:, None] + d[None, :],
                mask=live[:, None] & (d < DIM)[None, :],
                other=0.0,
            )
            if UPCAST:
                k = k.to(tl.float32)
            product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            product = tl.where(live[None, :], product, float("-inf"))
            most = tl.maximum(most, tl.max(product, axis=1))
        is_recent = number + RECENT > position // SPARSE_BLOCK
        most = tl.where(is_recent, float("inf"), most)
        rank = rank_of(most, tl.full([HEADS_PAD], 0, tl.int32) + number)
    to = ranks + (tl.program_id(0).to(tl.int64) * HEADS + h) * num_blocks + number
    tl.store(to, rank, mask=h < HEADS)


def plan_ranks(
    query: Tensor,
    key_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    sparse_block_size: int,
    recent: int,
    first: int,
    count: int,
) -> Plan[Tensor]:
    """Ranks [count, H, sparse blocks] int64 of tokens from `first` on, over the longest context."""
    _, heads, dim = query.shape
    block_size, rows = key_cache.shape[2], context_len.shape[0]
    num_blocks = cdiv(block_table.shape[1] * block_size, sparse_block_size)
    ranks = torch.empty(count, heads, num_blocks, dtype=torch.int64, device=query.device)
    launch = Launch(
        kernel=block_rank_kernel,
        grid=(count, num_blocks),
        args={
            "query": query, "key_cache": key_cache, "query_start": query_start,
            "context_len": context_len, "block_table": block_table, "ranks": ranks,
            "query_token": query.stride(0), "query_head": query.stride(1),
            "kc_block": key_cache.stride(0), "kc_slot": key_cache.stride(2),
            "table_row": block_table.stride(0),
            "first_token": first, "num_rows": rows, "num_blocks": num_blocks,
        },
        constants={
            "HEADS": heads, "HEADS_PAD": power_of_2(heads, 16),
            "DIM": dim, "DIM_PAD": power_of_2(dim, 16), "BLOCK_SIZE": block_size,
            "SPARSE_BLOCK": sparse_block_size, "RECENT": recent,
            "BLOCK_N": min(_MAX_KEYS, power_of_2(sparse_block_size, 16)),
            "ROWS": rows_capacity(rows),
            "PRECISION": dot_precision(query.dtype),
            "UPCAST": needs_upcast(query.dtype),
        },
    )  # fmt: skip
    return Plan(out=ranks, launches=(launch,))


def _run(
    query: Tensor,
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    top_k: int,
    sparse_block_size: int,
    recent: int,
) -> Tensor:
    write_keys(key, key_cache, slot_mapping)
    tokens, heads = query.shape[:2]
    num_blocks = cdiv(block_table.shape[1] * key_cache.shape[2], sparse_block_size)
    out = torch.full((tokens, heads, top_k), -1, dtype=torch.int32, device=query.device)
    count, k = rows_at_once(heads * num_blocks), min(top_k, num_blocks)
    for first in range(0, tokens, count):
        some = min(count, tokens - first)
        ranks = plan_ranks(
            query, key_cache, query_start, context_len, block_table,
            sparse_block_size, recent, first, some,
        ).run()  # fmt: skip
        chosen = best_places(ranks.flatten(0, 1), k)
        out[first : first + some, :, :k] = chosen.view(some, heads, k)
    return out


define(choose_blocks, run=_run, supports=takes_indexer)
