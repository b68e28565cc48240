"""The paged-attention kernel: one key range of one query tile, for one key head.

The rows of a query tile are BLOCK_Q queries x GROUP heads that share a key head, so keys and values
are read once for all of them. Keys are processed in tiles of BLOCK_N positions, whatever the
cache's block size: each position is looked up in the block table. Online softmax in base 2.

Two things keep NaN out of the result. Keys and values outside [lo, hi) are never used (a block
without an owner can hold anything, and 0 * NaN is NaN). A row for which no key of a tile is visible
keeps its maximum at -inf without subtracting infinities.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmc.kernels.triton.attention_combine import MINUS_INF, combine
from llmc.kernels.triton.attention_plan import at, divide, first_visible, locate, total_before
from llmc.kernels.triton.attention_rope import write_new
from llmc.kernels.triton.cached import INT8, NONE, rotate, slot_scale, widen
from llmc.kernels.triton.counters import is_last
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.rope_write import mean_square, turn

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    return 2 / (1 + tl.exp2(-2 * LOG2E * x)) - 1


@triton.jit
def load_tile(cache, blocks, inside, stride_block, stride_slot, live, DTYPE: tl.constexpr,
              DIM: tl.constexpr, DIM_PAD: tl.constexpr, MASKED: tl.constexpr,
              FORMAT: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """A tile [BLOCK_N, DIM_PAD] of a cache, in DTYPE, unscaled; `cache` points to the head."""
    d = tl.arange(0, DIM_PAD)[None, :]
    at_key = blocks * stride_block + inside * stride_slot
    pointers = cache + at_key[:, None] + d
    if MASKED:
        tile = tl.load(pointers, mask=live[:, None] & (d < DIM), other=0)
    elif DIM_PAD != DIM:
        tile = tl.load(pointers, mask=d < DIM, other=0)
    else:
        tile = tl.load(pointers)
    if FORMAT != NONE:
        tile = widen(tile, FORMAT, NATIVE)
    return tile.to(DTYPE)


@triton.jit
def load_scales(scale, blocks, inside, stride_block, stride_slot, live,
                BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The scales [1, BLOCK_N] of a tile; `scale` points to the head in an int8 cache's floats."""
    of_row = slot_scale(scale, blocks, inside, stride_block, stride_slot, BLOCK_SIZE, INT8)
    found = tl.load(of_row, mask=live, other=0.0) if MASKED else tl.load(of_row)
    return found[None, :]


@triton.jit
def attend_tile(q, q_value, m, norm, acc, start, hi, pos, slope, bias, table,
                key_cache, value_cache, key_scale, value_scale, key_row, value_row,
                kc_block, kc_slot, vc_block, vc_slot, scale, softcap,
                BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr,
                WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
                ALIBI: tl.constexpr, DISTANCES: tl.constexpr,
                SHARED: tl.constexpr, MASKED: tl.constexpr,
                PRECISION: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
                DESCRIPTORS: tl.constexpr):  # fmt: skip
    """One step of the online softmax over keys [start, start + BLOCK_N).

    m is the running maximum in base 2, norm the sum of weights, acc the weighted values.
    MASKED=False promises that every key of the tile is visible to every query. SHARED: values are
    also channels of the keys and are multiplied by q_value; q is for the other DIM channels. bias:
    pointers to what the queries add to the scores of keys 0, 1, ... DISTANCES - 1 positions before.
    DESCRIPTORS: the caches are descriptors of rows [rows, DIM] (attention_tiles.py), strides count
    rows, and the head's rows start at key_row and value_row.
    """
    n = start + tl.arange(0, BLOCK_N)
    live = n < hi
    if DESCRIPTORS:  # a tile lies in one block
        blocks = tl.load(table + start // BLOCK_SIZE)
    elif MASKED:
        blocks = tl.load(table + n // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + n // BLOCK_SIZE).to(tl.int64)
    inside = n % BLOCK_SIZE
    if DESCRIPTORS:
        k = key_cache.load([key_row + blocks * kc_block + start % BLOCK_SIZE, 0]).to(q.dtype)
    else:
        k = load_tile(key_cache, blocks, inside, kc_block, kc_slot, live, q.dtype,
                      DIM, DIM_PAD, MASKED, FORMAT, NATIVE)  # fmt: skip
    if DISTANCES > 0:
        distance = pos[:, None] - n[None, :]
        near = (distance >= 0) & (distance < DISTANCES)
        added = tl.load(bias[:, None] + distance, mask=near, other=0.0).to(tl.float32)
    # added to products, scores keep the layout of those
    if DISTANCES > 0 and not SOFTCAP and FORMAT != INT8:
        s = tl.dot(q, tl.trans(k), added / scale, input_precision=PRECISION)
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SHARED:
        v = load_tile(value_cache, blocks, inside, vc_block, vc_slot, live, q.dtype,
                      V_DIM, V_DIM_PAD, MASKED, FORMAT, NATIVE)  # fmt: skip
        s = tl.dot(q_value, tl.trans(v), s, input_precision=PRECISION)
    if FORMAT == INT8:
        s *= load_scales(key_scale, blocks, inside, kc_block, kc_slot, live, BLOCK_SIZE, MASKED)
    s *= scale
    if SOFTCAP:
        s = softcap * tanh(s / softcap)
    if ALIBI:
        s += slope[:, None] * (n[None, :] - pos[:, None]).to(tl.float32)
    if DISTANCES > 0 and (SOFTCAP or FORMAT == INT8):
        s += added
    s *= LOG2E
    if MASKED:
        seen = live[None, :] & (n[None, :] <= pos[:, None])
        if WINDOW > 0:
            seen = seen & (pos[:, None] - n[None, :] < WINDOW)
        if CHUNK > 0:
            seen = seen & (n[None, :] >= (pos // CHUNK * CHUNK)[:, None])
        s = tl.where(seen, s, MINUS_INF)
    higher = tl.maximum(m, tl.max(s, axis=1))
    base = tl.where(higher == MINUS_INF, 0.0, higher)
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(m - base)
    norm = norm * fade + tl.sum(p, axis=1)
    if FORMAT == INT8:  # weights take the scales, which can be too small for float16
        p *= load_scales(value_scale, blocks, inside, vc_block, vc_slot, live, BLOCK_SIZE, MASKED)
    V_DTYPE: tl.constexpr = tl.bfloat16 if FORMAT == INT8 and q.dtype == tl.float16 else q.dtype
    if DESCRIPTORS:
        v = value_cache.load([value_row + blocks * vc_block + start % BLOCK_SIZE, 0]).to(q.dtype)
        if MASKED:  # 0 * NaN is NaN; of the keys, other scores are replaced
            v = tl.where(live[:, None], v, 0)
    elif not SHARED:
        v = load_tile(value_cache, blocks, inside, vc_block, vc_slot, live, V_DTYPE,
                      V_DIM, V_DIM_PAD, MASKED, FORMAT, NATIVE)  # fmt: skip
    acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return higher, norm, acc


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "table_row", "target"],
    # parts of a step's requests begin anywhere: a variant for each alignment would be compiled
    # while serving, and numbers that are read one by one gain nothing from it
    do_not_specialize_on_alignment=["query_start", "context_len", "block_table"],
)
def attention_kernel(
    query, key_cache, value_cache, query_start, context_len, block_table, sinks, slopes,
    distance_bias, k_scale, v_scale,
    key, value, query_norm, key_norm, cos_table, sin_table, positions, slots,
    out, part_acc, part_m, part_l, counters,
    query_token, query_head, sinks_token, bias_token, bias_head, out_token, out_head,
    kc_block, kc_head, kc_slot, vc_block, vc_head, vc_slot, table_row,
    key_token, key_head, value_token, value_head, cos_row, sin_row, eps, norm_offset,
    scale, softcap, num_rows, num_tokens, target,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, GROUP_TILES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, ALIBI: tl.constexpr, DISTANCES: tl.constexpr,
    SHARED: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    K_SCALE_STRIDE: tl.constexpr, V_SCALE_STRIDE: tl.constexpr,
    COMBINE_ROWS: tl.constexpr, COMBINE_SPLITS: tl.constexpr,
    ROPE: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr, NORM_LAST: tl.constexpr, PDL: tl.constexpr,
    DESCRIPTORS: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_TILE
    # With ROPE the plan is made before the wait. Then its inputs are a step's own: the kernel that
    # wrote them also wrote the token ids from which others have since computed the queries, so it
    # is not the one right before. All earlier ones are done: a kernel starts once each program of
    # the one before has either ended or waited for all that came before it.
    EARLY: tl.constexpr = PDL and ROPE
    if PDL and not EARLY:
        wait_for_previous()
    items, splits = divide(query_start, context_len, num_rows, target, ROWS, BLOCK_Q, BLOCK_N,
                           MIN_TILES, WINDOW, CHUNK)  # fmt: skip
    if not SPLIT:
        splits = splits * 0 + 1
    row, place = locate(tl.program_id(0), items * splits, ROWS)
    # after the requests' items: items of queries past the last request, which are set to zero
    tail = (num_tokens - tl.load(query_start + num_rows) + BLOCK_Q - 1) // BLOCK_Q
    if EARLY:  # before any return, or a kernel could end before the ones that it follows
        wait_for_previous()
    if (row >= num_rows) & (place >= tail):
        return
    row_splits = tl.where(row < num_rows, at(splits, row, ROWS), 1)
    row_items = tl.where(row < num_rows, at(items, row, ROWS), tail)
    row = tl.minimum(row, num_rows)
    split = place % row_splits
    item = row_items - 1 - place // row_splits  # late queries see the most keys, so they go first

    # the queries and heads of the tile
    q_start = tl.load(query_start + row)
    q_end = tl.load(query_start + row + 1, mask=row < num_rows, other=num_tokens)
    context = tl.load(context_len + row, mask=row < num_rows, other=0)
    kv_head = tl.program_id(1) // GROUP_TILES
    key_scale = k_scale
    value_scale = v_scale
    if FORMAT == INT8:
        key_scale += kv_head.to(tl.int64) * kc_head // 4
        value_scale += kv_head.to(tl.int64) * vc_head // 4
    elif k_scale is not None:
        scale *= tl.load(k_scale + kv_head * K_SCALE_STRIDE)
    m_index = tl.arange(0, BLOCK_M)
    token = q_start + item * BLOCK_Q + m_index // GROUP_TILE
    group_head = (tl.program_id(1) % GROUP_TILES) * GROUP_TILE + m_index % GROUP_TILE
    valid = (token < q_end) & (group_head < GROUP) & (m_index < BLOCK_Q * GROUP_TILE)
    head = kv_head * GROUP + group_head
    offset = context - q_end  # position of token t is t + offset
    pos = token + offset
    d = tl.arange(0, DIM_PAD)
    dv = tl.arange(0, V_DIM_PAD)
    OWN: tl.constexpr = V_DIM if SHARED else 0  # first channel of the keys that q multiplies
    of_row = query + token.to(tl.int64)[:, None] * query_token + head[:, None] * query_head
    if ROPE:
        at_position = tl.load(positions + token, mask=valid, other=0)[:, None]
        mean, weight = None, query_norm
        if QUERY_NORM > DIM:  # of all heads, most of which are other programs'
            mean, weight = tl.zeros([BLOCK_M, 1], tl.float32), query_norm + head[:, None] * DIM
            first = q_start + item * BLOCK_Q
            for i in tl.range(0, tl.minimum(BLOCK_Q, q_end - first)):
                of_token = mean_square(query + (first + i).to(tl.int64) * query_token, QUERY_NORM)
                mean = tl.where(token[:, None] == first + i, of_token, mean)
        q = turn(of_row, weight, cos_table + at_position * cos_row,
                 sin_table + at_position * sin_row, valid[:, None], eps, norm_offset, QUERY_NORM,
                 DIM, DIM_PAD, WIDTH, INTERLEAVED, NORM_LAST, mean)  # fmt: skip
        q = q.to(query.dtype.element_ty)
    else:
        q = tl.load(of_row + OWN + d[None, :], mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
    if FORMAT == INT8:  # as the keys are
        q = rotate(q.to(tl.float32), DIM).to(q.dtype)
    q_value = q
    if SHARED:
        mask = valid[:, None] & (dv < V_DIM)[None, :]
        q_value = tl.load(of_row + dv[None, :], mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
        q_value = q_value.to(tl.float32)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32)
    bias = distance_bias
    if DISTANCES > 0:  # rows without a query read the first query's
        of_query = token.to(tl.int64) * bias_token + head * bias_head
        bias = distance_bias + tl.where(valid, of_query, 0)

    # the keys of the tile, and this program's range of them
    pos_first = q_start + item * BLOCK_Q + offset
    pos_last = tl.minimum(pos_first + BLOCK_Q, context) - 1
    lo = first_visible(tl.maximum(pos_first, 0), WINDOW, CHUNK)
    hi = tl.maximum(pos_last + 1, lo)
    if SPLIT:
        tiles = (hi - lo + BLOCK_N - 1) // BLOCK_N
        keys = (tiles + row_splits - 1) // row_splits * BLOCK_N
        lo += split * keys
        hi = tl.minimum(hi, lo + keys)

    if ROPE:
        first_new = tl.maximum(lo, context - (q_end - q_start))
        write_new(key, value, key_norm, cos_table, sin_table, positions, slots,
                  key_cache, value_cache, k_scale, v_scale,
                  kv_head, tl.num_programs(1) // GROUP_TILES, first_new, hi, offset,
                  key_token, key_head, value_token, value_head, cos_row, sin_row, eps, norm_offset,
                  kc_block, kc_head, kc_slot, vc_block, vc_head, vc_slot, BLOCK_SIZE, DIM, DIM_PAD,
                  V_DIM, V_DIM_PAD, WIDTH, INTERLEAVED, KEY_NORM, NORM_LAST, FORMAT,
                  K_SCALE_STRIDE, V_SCALE_STRIDE)  # fmt: skip

    m = tl.full([BLOCK_M], MINUS_INF, tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_DIM_PAD], tl.float32)
    if SINKS:
        at_sink = token.to(tl.int64) * sinks_token + head
        sink = tl.load(sinks + at_sink, mask=valid, other=0.0).to(tl.float32) * LOG2E
        m = tl.where(split == 0, sink, m)
        norm = tl.where(split == 0, 1.0, norm)

    table = block_table + row.to(tl.int64) * table_row
    key_row = kv_head * kc_head
    value_row = kv_head * vc_head
    if DESCRIPTORS:
        keys_of_head = key_cache
        values_of_head = value_cache
    else:
        keys_of_head = key_cache + kv_head.to(tl.int64) * kc_head + OWN
        values_of_head = value_cache + kv_head.to(tl.int64) * vc_head
    # key tiles that are fully visible to all queries need no mask; for a few rows a mask costs less
    # than the start of another loop, in which nothing is loaded ahead
    if WINDOW == 0 and CHUNK == 0 and BLOCK_M > 16:
        open_end = lo + tl.maximum(tl.minimum(pos_first + 1, hi) - lo, 0) // BLOCK_N * BLOCK_N
        for start in tl.range(lo, open_end, BLOCK_N, warp_specialize=SPECIALIZE):
            m, norm, acc = attend_tile(
                q, q_value, m, norm, acc, start, hi, pos, slope, bias, table,
                keys_of_head, values_of_head, key_scale, value_scale, key_row, value_row,
                kc_block, kc_slot, vc_block, vc_slot, scale, softcap,
                BLOCK_N, BLOCK_SIZE, DIM, DIM_PAD, V_DIM, V_DIM_PAD,
                WINDOW, CHUNK, SOFTCAP, ALIBI, DISTANCES, SHARED, False, PRECISION, FORMAT, NATIVE,
                DESCRIPTORS,
            )  # fmt: skip
        lo = open_end
    for start in tl.range(lo, hi, BLOCK_N, warp_specialize=SPECIALIZE):
        m, norm, acc = attend_tile(
            q, q_value, m, norm, acc, start, hi, pos, slope, bias, table,
            keys_of_head, values_of_head, key_scale, value_scale, key_row, value_row,
            kc_block, kc_slot, vc_block, vc_slot, scale, softcap,
            BLOCK_N, BLOCK_SIZE, DIM, DIM_PAD, V_DIM, V_DIM_PAD,
            WINDOW, CHUNK, SOFTCAP, ALIBI, DISTANCES, SHARED, True, PRECISION, FORMAT, NATIVE,
            DESCRIPTORS,
        )  # fmt: skip

    if FORMAT != INT8 and v_scale is not None:
        acc *= tl.load(v_scale + kv_head * V_SCALE_STRIDE)
    if row_splits == 1:
        result = acc / tl.where(norm > 0, norm, 1.0)[:, None]
        tl.store(
            out + token.to(tl.int64)[:, None] * out_token + head[:, None] * out_head + dv[None, :],
            result.to(out.dtype.element_ty),
            mask=valid[:, None] & (dv < V_DIM)[None, :],
        )
    elif SPLIT:
        cut = tl.where(splits > 1, items * splits, 0)
        first = total_before(cut, row, ROWS) + place // row_splits * row_splits
        at_row = ((first + split) * tl.num_programs(1) + tl.program_id(1)) * BLOCK_M + m_index
        tl.store(part_m + at_row, m)
        tl.store(part_l + at_row, norm)
        at_row = at_row.to(tl.int64)[:, None] * V_DIM_PAD
        tl.store(part_acc + at_row + dv[None, :], acc)
        if is_last(counters + first * tl.num_programs(1) + tl.program_id(1), row_splits):
            first_token = q_start + item * BLOCK_Q
            tile_rows = tl.minimum(q_end - first_token, BLOCK_Q) * GROUP_TILE
            combine(part_acc, part_m, part_l, out, first, row_splits, first_token, tile_rows,
                    kv_head, out_token, out_head, GROUP, GROUP_TILE, GROUP_TILES, V_DIM, V_DIM_PAD,
                    BLOCK_M, COMBINE_ROWS, COMBINE_SPLITS)  # fmt: skip
