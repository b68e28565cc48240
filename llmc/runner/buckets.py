"""The batch sizes that decode steps are padded to, and whether to add another one.

A captured graph serves one batch size. The default sizes bound the padding for any load; a load
that stays at one size in between gets its own bucket.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence

_WINDOW = 512  # decode steps between two evaluations
_WASTE = 0.10  # fraction of dummies among computed rows, above which a size is added
MAX_MIXED_TOKENS = 2048
_MAX_ADDED = 8  # each size is one more graph to keep


def default_buckets(max_rows: int) -> tuple[int, ...]:
    """Decode batch sizes: 1, 2, 4, 8, then steps of 8 to 64, of 16 to 256, and of 64 beyond."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_rows + 64, 64)]
    return (*[s for s in sizes if s < max_rows], max_rows)


def powers_of_2(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(most.bit_length())]


def mixed_tokens(tokens: int) -> int | None:
    """Packed tokens that a step with prompts is padded to. None above 2048, where the host stays
    ahead of the device without graphs.

    Four sizes per doubling, so at most a quarter more; above 512 tokens, where the products take
    most of the time, eight: then at most a tile of them (128 rows) is padding.
    """
    if tokens > MAX_MIXED_TOKENS:
        return None
    log_sizes = 3 if tokens > 512 else 2
    step = max(8, 1 << max((tokens - 1).bit_length() - 1 - log_sizes, 0))
    return -(-tokens // step) * step


class Buckets:
    """Sorted bucket sizes and a histogram of recent batch sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"batch sizes must be positive, got {list(sizes)}")
        self.sizes = sorted(set(sizes))
        self._added = 0
        self._seen: Counter[int] = Counter()
        self.num_rows = 0  # rows of requests in all decode steps so far
        self.num_padding = 0  # dummies added to them

    def choose(self, rows: int) -> int:
        """The smallest size that holds `rows`; `rows` itself beyond the largest."""
        i = bisect_left(self.sizes, rows)
        return self.sizes[i] if i < len(self.sizes) else rows

    def observe(self, rows: int) -> int | None:
        """Count a decode step. -> a size that was just added because of too much padding."""
        self._seen[rows] += 1
        self.num_rows += rows
        self.num_padding += self.choose(rows) - rows
        if self._seen.total() < _WINDOW:
            return None
        seen, self._seen = self._seen, Counter()
        return self._add_one(seen)

    def _add_one(self, seen: Counter[int]) -> int | None:
        """Add the size that would have saved most of the window's padding, if it was too much."""
        wasted = {rows: (self.choose(rows) - rows) * times for rows, times in seen.items()}
        computed = sum(self.choose(rows) * times for rows, times in seen.items())
        if self._added == _MAX_ADDED or sum(wasted.values()) <= _WASTE * computed:
            return None
        size = max(wasted, key=lambda rows: wasted[rows])
        insort(self.sizes, size)
        self._added += 1
        return size
