"""Combines the partial results of a query tile whose keys were split into ranges.

The program that finishes a tile's last range does it, in the order of the ranges, so that results
do not depend on which one that is (counters.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

# a plain float: float("-inf") in a kernel would be a call
MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def combine(part_acc, part_m, part_l, out, first, splits, first_token, tile_rows, kv_head,
            out_token, out_head,
            GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, GROUP_TILES: tl.constexpr,
            V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
            ROWS: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Write the results of a tile with `tile_rows` rows, whose ranges are the parts from `first`.

    Other programs wrote the parts: they are read from L2, past this multiprocessor's own cache.
    """
    dv = tl.arange(0, V_DIM_PAD)
    for row0 in tl.range(0, tile_rows, ROWS):
        row = row0 + tl.arange(0, ROWS)
        group_head = (tl.program_id(1) % GROUP_TILES) * GROUP_TILE + row % GROUP_TILE
        valid = (row < tile_rows) & (group_head < GROUP)
        m = tl.full([ROWS], MINUS_INF, tl.float32)
        norm = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, V_DIM_PAD], tl.float32)
        for s0 in tl.range(0, splits, SPLITS):
            s = s0 + tl.arange(0, SPLITS)
            part = (first + s) * tl.num_programs(1) + tl.program_id(1)
            at = part[:, None] * BLOCK_M + row[None, :]
            live = (s < splits)[:, None] & valid[None, :]
            ms = tl.load(part_m + at, mask=live, other=MINUS_INF, cache_modifier=".cg")
            ls = tl.load(part_l + at, mask=live, other=0.0, cache_modifier=".cg")
            values = tl.load(
                part_acc + at.to(tl.int64)[:, :, None] * V_DIM_PAD + dv[None, None, :],
                mask=live[:, :, None],
                other=0.0,
                cache_modifier=".cg",
            )
            higher = tl.maximum(m, tl.max(ms, axis=0))
            base = tl.where(higher == MINUS_INF, 0.0, higher)
            weight = tl.exp2(ms - base[None, :])
            fade = tl.exp2(m - base)
            norm = norm * fade + tl.sum(weight * ls, axis=0)
            acc = acc * fade[:, None] + tl.sum(weight[:, :, None] * values, axis=0)
            m = higher
        result = acc / tl.where(norm > 0, norm, 1.0)[:, None]
        at_token = (first_token + row // GROUP_TILE).to(tl.int64) * out_token
        at_head = (kv_head * GROUP + group_head) * out_head
        tl.store(
            out + (at_token + at_head)[:, None] + dv[None, :],
            result.to(out.dtype.element_ty),
            mask=valid[:, None] & (dv < V_DIM)[None, :],
        )
