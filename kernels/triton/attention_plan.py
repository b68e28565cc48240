"""How paged attention divides a step among a grid that is fixed by shapes alone.

A work item is a tile of one request's queries. Its keys are cut into equal ranges so that all
items together make about `target` ranges a head: a long context among short ones becomes many
ranges, so that no program works much longer than the others. Each range is a slot of the grid.
Every program computes this plan again from query_start and context_len: a few hundred integers,
cheaper than one more launch a layer.

With N items there are fewer than N + target slots, fewer than 2 * target of them from items that
are cut, and so at most `target` cut items: bounds that need no values, which is what a CUDA graph
wants.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_visible(pos, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a query at `pos` sees."""
    first = pos * 0
    if WINDOW > 0:
        first = tl.maximum(first, pos - (WINDOW - 1))
    if CHUNK > 0:
        first = tl.maximum(first, pos // CHUNK * CHUNK)
    return first


@triton.jit
def divide(query_start, context_len, num_rows, target, ROWS: tl.constexpr,
           BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr,
           WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """-> for each request: its items, and into how many key ranges each of them is cut."""
    r = tl.arange(0, ROWS)
    start = tl.load(query_start + r, mask=r < num_rows, other=0)
    end = tl.load(query_start + r + 1, mask=r < num_rows, other=0)
    context = tl.load(context_len + r, mask=r < num_rows, other=0)
    queries = tl.maximum(end - start, 0)
    items = (queries + BLOCK_Q - 1) // BLOCK_Q
    first = first_visible(tl.maximum(context - queries, 0), WINDOW, CHUNK)
    tiles = (context - first + BLOCK_N - 1) // BLOCK_N
    # float32: items * tiles of a long prompt can pass 2^31 in sum, and an estimate is enough
    total = tl.sum((items * tiles).to(tl.float32), axis=0)
    share = tl.maximum((total / target).to(tl.int32) + 1, MIN_TILES)
    return items, tl.maximum((tiles + share - 1) // share, 1)


@triton.jit
def locate(index, counts, ROWS: tl.constexpr):
    """The row that `index` falls into when rows have counts[r] places each, and its place there.

    A row of ROWS or more means: past the end.
    """
    r = tl.arange(0, ROWS)
    ends = tl.cumsum(counts, axis=0)
    row = tl.sum((ends <= index).to(tl.int32), axis=0)
    before = tl.sum(tl.where(r < row, counts, 0), axis=0)
    return row, index - before


@triton.jit
def request_of(token, query_start, context_len, num_rows, ROWS: tl.constexpr):
    """-> the request that a token belongs to, and its position there; negative for no request."""
    r = tl.arange(0, ROWS)
    ends = tl.load(query_start + r + 1, mask=r < num_rows, other=2147483647)
    row = tl.sum((ends <= token).to(tl.int32), axis=0)
    known = row < num_rows
    end = tl.load(query_start + row + 1, mask=known, other=0)
    context = tl.load(context_len + row, mask=known, other=0)
    position = tl.where(known & (context > 0), context - end + token, -1)
    return tl.where(known, row, 0), position


@triton.jit
def at(values, row, ROWS: tl.constexpr):
    """values[row] of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, ROWS) == row, values, 0), axis=0)


@triton.jit
def total_before(values, row, ROWS: tl.constexpr):
    """sum(values[:row]) of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, ROWS) < row, values, 0), axis=0)
