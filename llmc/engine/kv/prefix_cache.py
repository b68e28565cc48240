"""Prefix cache lookup for several groups of layers with different attention windows.

A prefix of n blocks is a hit if every group has the blocks that the next token attends to: all of
them, or the last few for a windowed group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmc.engine.kv.block_pool import BlockPool
from llmc.engine.kv.layout import WHOLE, CacheLayout

NO_BLOCK = -1  # marks a block that a windowed group has freed


def live(blocks: Iterable[int]) -> list[int]:
    return [block for block in blocks if block != NO_BLOCK]


def group_digest(digest: bytes, group: int) -> bytes:
    """The key of a block of tokens in one group."""
    return digest + bytes((group,)) if group else digest


def find_prefix(pool: BlockPool, layout: CacheLayout, digests: Sequence[bytes]) -> list[int]:
    """The longest cached run of blocks, flat as in `BlockTable.blocks`. Takes no references."""
    if layout.windows == (WHOLE,):
        return pool.find_prefix(digests)
    found: list[list[int]] = []
    most = len(digests)
    for group, window in enumerate(layout.windows):
        names = (group_digest(digest, group) for digest in digests[:most])
        if window.is_whole:
            found.append(pool.find_prefix(list(names)))
            most = len(found[-1])
        else:
            found.append([pool.find(name) for name in names])
    num = _longest(layout, found, most)
    return [
        blocks[i] if i >= layout.first_needed(group, num * layout.block_size) else NO_BLOCK
        for i in range(num)
        for group, blocks in enumerate(found)
    ]


def _longest(layout: CacheLayout, found: Sequence[Sequence[int]], most: int) -> int:
    """The longest prefix, in blocks, for which every group has what the next token attends to."""
    runs = [0] * len(found)  # consecutive found blocks up to the current one
    longest = 0
    for num in range(1, most + 1):
        position = num * layout.block_size
        fits = True
        for group, blocks in enumerate(found):
            runs[group] = runs[group] + 1 if blocks[num - 1] != NO_BLOCK else 0
            fits = fits and runs[group] >= num - layout.first_needed(group, position)
        if fits:
            longest = num
    return longest
