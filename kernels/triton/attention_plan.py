"""How paged attention divides a step over a grid that depends only on shapes.

A work item is a tile of one request's queries. Its keys are split into equal ranges so that all
items together have about `target` ranges per head: a long context among short ones is split into
many ranges, so that no program runs much longer than the others. Each range is a slot of the grid.
Every program recomputes this plan from query_start and context_len: a few hundred integers, cheaper
than one more launch per layer.

With N items there are fewer than N + target slots, of which fewer than 2 * target are from split
items, so at most `target` items are split. These bounds do not depend on values, as CUDA graphs
require.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_visible(pos, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that is visible to a query at `pos`."""
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
    """For each request: its number of items, and the number of key ranges per item."""
    r = tl.arange(0, ROWS)
    start = tl.load(query_start + r, mask=r < num_rows, other=0)
    end = tl.load(query_start + r + 1, mask=r < num_rows, other=0)
    context = tl.load(context_len + r, mask=r < num_rows, other=0)
    queries = tl.maximum(end - start, 0)
    items = (queries + BLOCK_Q - 1) // BLOCK_Q
    first = first_visible(tl.maximum(context - queries, 0), WINDOW, CHUNK)
    tiles = (context - first + BLOCK_N - 1) // BLOCK_N
    # float32: the sum can exceed 2^31 for long prompts, and an estimate is enough
    total = tl.sum((items * tiles).to(tl.float32), axis=0)
    share = tl.maximum((total / target).to(tl.int32) + 1, MIN_TILES)
    return items, tl.maximum((tiles + share - 1) // share, 1)


@triton.jit
def locate(index, counts, ROWS: tl.constexpr):
    """The row that `index` falls into if row r has counts[r] elements, and the index in the row.

    A row of ROWS or more means past the end.
    """
    r = tl.arange(0, ROWS)
    ends = tl.cumsum(counts, axis=0)
    row = tl.sum((ends <= index).to(tl.int32), axis=0)
    before = tl.sum(tl.where(r < row, counts, 0), axis=0)
    return row, index - before


@triton.jit
def request_of(token, query_start, context_len, num_rows, ROWS: tl.constexpr):
    """The request of a token and its position in it; a negative position means no request."""
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
    """values[row] for a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, ROWS) == row, values, 0), axis=0)


@triton.jit
def total_before(values, row, ROWS: tl.constexpr):
    """sum(values[:row]) for a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, ROWS) < row, values, 0), axis=0)
