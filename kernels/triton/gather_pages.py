"""Copies keys and values of some requests out of their pages, packed for kernels without paging.

Not an op: it is used by `paged_attention` when another kernel computes prompts
(prompt_attention.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.triton.configs import GATHER_TOKENS
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.write_kv import cache_strides


@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["key_start", "block_table"],  # prompts begin at any request
)
def gather_kernel(
    key_cache, value_cache, key_start, block_table, key_out, value_out,
    kc_block, kc_head, kc_slot, vc_block, vc_head, vc_slot, table_row,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr,
):  # fmt: skip
    """A program copies one head of TOKENS tokens of one request."""
    row = tl.program_id(0)
    head = tl.program_id(2)
    first = tl.load(key_start + row)
    last = tl.load(key_start + row + 1)
    n = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    live = n < last - first
    block = tl.load(
        block_table + row.to(tl.int64) * table_row + n // BLOCK_SIZE, mask=live, other=0
    ).to(tl.int64)
    inside = n % BLOCK_SIZE
    place = (first + n).to(tl.int64)[:, None] * KV_HEADS + head
    d = tl.arange(0, DIM_PAD)[None, :]
    mask = live[:, None] & (d < DIM)
    at_key = (block * kc_block + inside * kc_slot)[:, None] + head * kc_head
    tl.store(key_out + place * DIM + d, tl.load(key_cache + at_key + d, mask=mask), mask=mask)
    d = tl.arange(0, V_DIM_PAD)[None, :]
    mask = live[:, None] & (d < V_DIM)
    at_value = (block * vc_block + inside * vc_slot)[:, None] + head * vc_head
    values = tl.load(value_cache + at_value + d, mask=mask)
    tl.store(value_out + place * V_DIM + d, values, mask=mask)


def plan(
    key_cache: Tensor,
    value_cache: Tensor,
    key_start: Tensor,
    block_table: Tensor,
    num_keys: int,
    longest: int,
) -> Plan[tuple[Tensor, Tensor]]:
    """Returns keys [num_keys, Hkv, D] and values [num_keys, Hkv, Dv].

    Caches as in `paged_attention`; key_start [P + 1] int32: each request's first row in the output;
    block_table [P, max_blocks] int32. `longest`: the maximum number of tokens of a request.
    """
    _, kv_heads, block_size, dim = key_cache.shape
    v_dim = value_cache.shape[3]
    rows = key_start.shape[0] - 1
    key, value = (c.new_empty(num_keys, kv_heads, c.shape[3]) for c in (key_cache, value_cache))
    launch = Launch(
        kernel=gather_kernel,
        grid=(rows, cdiv(longest, GATHER_TOKENS), kv_heads),
        args={
            "key_cache": key_cache, "value_cache": value_cache, "key_start": key_start,
            "block_table": block_table, "key_out": key, "value_out": value,
            **cache_strides(key_cache, value_cache), "table_row": block_table.stride(0),
        },
        constants={
            "BLOCK_SIZE": block_size, "KV_HEADS": kv_heads, "TOKENS": GATHER_TOKENS,
            "DIM": dim, "DIM_PAD": power_of_2(dim), "V_DIM": v_dim, "V_DIM_PAD": power_of_2(v_dim),
        },
    )  # fmt: skip
    return Plan(out=(key, value), launches=(launch,))
