"""BlockPool: reference counts of the blocks of the key-value cache, and the prefix cache.

The pool does not touch tensors. A block is in one of three states: *referenced* by one or more
requests, *cached* (no reference, still in the prefix cache, evicted oldest first) or *blank*.

Only full blocks are shared, and full blocks are never written, so shared blocks are never written.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby

from llmc.engine.kv.snapshots import StateSnapshots
from llmc.engine.messages import BlockMap

_KEY = secrets.token_bytes(32)  # so that other processes can't guess or forge digests


class BlockPool:
    """Blocks 0 .. num_blocks - 1 with reference counts and an index of full blocks by content.

    With `num_snapshots`, prefixes can be shared only at points where a state snapshot was taken.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_snapshots: int = 0,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be positive, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.snapshots = StateSnapshots(num_snapshots, block_size) if num_snapshots else None
        self.num_queries = 0  # tokens looked up in the prefix cache
        self.num_hits = 0  # tokens found there
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack; block 0 is popped first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: blank ones, and cached ones, which are evictable."""
        return len(self._blank) + len(self._cached)

    # Prefix cache

    def root_digest(self, salt: bytes = b"") -> bytes:
        """Start of a chain of digests. Requests with different salts never share a block."""
        return hashlib.blake2b(salt, digest_size=16, key=_KEY, person=b"root").digest()

    def chain_digest(self, parent: bytes, token_ids: Sequence[int], shown: bytes = b"") -> bytes:
        """Key of a full block. It covers the block's tokens, the digests of images whose tokens it
        contains (`shown`) and, through `parent`, all tokens before the block."""
        block = parent + array("I", token_ids).tobytes() + shown
        return hashlib.blake2b(block, digest_size=16, key=_KEY, person=b"block").digest()

    def find_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """The longest cached run of blocks from the first digest on. Takes no references."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, digest: bytes) -> int:
        """The cached block with this digest, or -1."""
        return self._block_of.get(digest, -1)

    def publish(self, block: int, digest: bytes) -> None:
        """Add a full, computed block to the prefix cache, unless it already has an equal one."""
        if not self.enable_prefix_caching or self._digest_of[block] is not None:
            return
        if self._block_of.setdefault(digest, block) == block:
            self._digest_of[block] = digest

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove these blocks from the prefix cache: their contents may be wrong."""
        for block in blocks:
            self._drop_digest(block)
            if block in self._cached:
                del self._cached[block]
                self._blank.append(block)

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; requests keep their blocks. -> number of blocks removed."""
        named = list(self._block_of.values())
        self.forget(named)
        return len(named)

    def count_lookup(self, num_queried: int, num_hit: int) -> None:
        if self.enable_prefix_caching:
            self.num_queries += num_queried
            self.num_hits += num_hit

    # Allocate and free

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have no reference, so that sharing them reduces `num_free`."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that `find_prefix` returned."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self) -> int:
        """Allocate a block with undefined contents. The pool must have a free one."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._drop_digest(block)
        self._references[block] = 1
        return block

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each. Later blocks are evicted first: prefixes are reused most."""
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise AssertionError(f"block {block} was freed more often than allocated")
            self._references[block] = count
            if count == 0:
                if self._digest_of[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def _drop_digest(self, block: int) -> None:
        digest = self._digest_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._digest_of[block] = None
            if self.snapshots is not None:
                self.snapshots.drop(digest)

    # Monitoring

    def draw(self, max_cells: int) -> BlockMap:
        """The state of all blocks. Costs O(num_blocks), a few nanoseconds per block."""
        counts, digests = self._references, self._digest_of
        num_used = self.num_blocks - self.num_free
        width = -(-self.num_blocks // max_cells)
        cells = []
        for start in range(0, self.num_blocks, width):
            most, names = max(counts[start : start + width]), digests[start : start + width]
            cells.append(min(most, 2) + 1 if most else int(names.count(None) < len(names)))
        return BlockMap(
            num_blank=len(self._blank),
            num_cached=len(self._cached),
            num_used=num_used,
            num_shared=num_used - counts.count(1),
            num_saved=sum(counts) - num_used,
            blocks_per_cell=width,
            runs=[n for state, run in groupby(cells) for n in (state, len(list(run)))],
        )

    # Invariants

    def check(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Raise AssertionError unless all blocks are accounted for.

        `tables` are all block tables in use; without any, no block must be referenced.
        """
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
            _require(len(set(table)) == len(table), f"a table has a block twice: {table}")
        _require(expected == self._references, "reference counts differ from the block tables")
        blank, cached = set(self._blank), set(self._cached)
        used = {block for block, count in enumerate(expected) if count}
        _require(len(blank) == len(self._blank), "a block is blank twice")
        _require(not blank & cached, "a block is both blank and cached")
        _require(not used & (blank | cached), "a block is both free and in a table")
        lost = set(range(self.num_blocks)) - blank - cached - used
        _require(not lost, f"blocks {lost} are neither free nor in a table")
        named = {block: d for block, d in enumerate(self._digest_of) if d is not None}
        _require(not blank & named.keys(), "a blank block has a digest")
        _require(cached <= named.keys(), "a cached block has no digest")
        found = {block: digest for digest, block in self._block_of.items()}
        _require(len(found) == len(self._block_of), "two digests map to one block")
        _require(found == named, "a digest maps to another block")
        if self.snapshots is not None:
            self.snapshots.check(self._block_of)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
