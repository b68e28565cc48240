"""Combines the partial results of query tiles whose keys were split into ranges.

Program (i, head, chunk) combines rows `chunk` of the i-th split item; most programs have nothing to
do and return immediately. Items are numbered as in the attention kernel (attention_plan.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmc.kernels.triton.attention_kernel import MINUS_INF
from llmc.kernels.triton.attention_plan import at, divide, locate, total_before


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "target"])
def combine_kernel(
    query_start, context_len, out, part_acc, part_m, part_l,
    out_token, out_head, num_rows, num_tokens, target,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, GROUP_TILES: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    COMBINE_ROWS: tl.constexpr, COMBINE_SPLITS: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_TILE
    items, splits = divide(query_start, context_len, num_rows, target, ROWS, BLOCK_Q, BLOCK_N,
                           MIN_TILES, WINDOW, CHUNK)  # fmt: skip
    row, place = locate(tl.program_id(0), tl.where(splits > 1, items, 0), ROWS)
    if row >= num_rows:
        return
    row_splits = at(splits, row, ROWS)
    item = at(items, row, ROWS) - 1 - place
    q_start = tl.load(query_start + row)
    q_end = tl.load(query_start + row + 1)
    m_index = tl.program_id(2) * COMBINE_ROWS + tl.arange(0, COMBINE_ROWS)
    token = q_start + item * BLOCK_Q + m_index // GROUP_TILE
    group_head = (tl.program_id(1) % GROUP_TILES) * GROUP_TILE + m_index % GROUP_TILE
    head = tl.program_id(1) // GROUP_TILES * GROUP + group_head
    valid = (token < q_end) & (group_head < GROUP) & (m_index < BLOCK_Q * GROUP_TILE)

    first = total_before(tl.where(splits > 1, items * splits, 0), row, ROWS) + place * row_splits
    dv = tl.arange(0, V_DIM_PAD)
    m = tl.full([COMBINE_ROWS], MINUS_INF, tl.float32)
    norm = tl.zeros([COMBINE_ROWS], tl.float32)
    acc = tl.zeros([COMBINE_ROWS, V_DIM_PAD], tl.float32)
    for s0 in tl.range(0, row_splits, COMBINE_SPLITS):
        s = s0 + tl.arange(0, COMBINE_SPLITS)
        at_row = ((first + s) * tl.num_programs(1) + tl.program_id(1))[:, None] * BLOCK_M + m_index
        live = (s < row_splits)[:, None] & valid[None, :]
        ms = tl.load(part_m + at_row, mask=live, other=MINUS_INF)
        ls = tl.load(part_l + at_row, mask=live, other=0.0)
        part = tl.load(
            part_acc + at_row.to(tl.int64)[:, :, None] * V_DIM_PAD + dv[None, None, :],
            mask=live[:, :, None],
            other=0.0,
        )
        higher = tl.maximum(m, tl.max(ms, axis=0))
        base = tl.where(higher == MINUS_INF, 0.0, higher)
        weight = tl.exp2(ms - base[None, :])
        fade = tl.exp2(m - base)
        norm = norm * fade + tl.sum(weight * ls, axis=0)
        acc = acc * fade[:, None] + tl.sum(weight[:, :, None] * part, axis=0)
        m = higher
    result = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    tl.store(
        out + token.to(tl.int64)[:, None] * out_token + head[:, None] * out_head + dv[None, :],
        result.to(out.dtype.element_ty),
        mask=valid[:, None] & (dv < V_DIM)[None, :],
    )
