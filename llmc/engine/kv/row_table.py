"""RowTable: assigns rows and blocks to requests.

The scheduler decides which requests are admitted and which leave. The table finds shared blocks,
allocates and frees blocks and rows, and collects the copies and released rows for the next plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from llmc.engine.adapters import AdapterSlots
from llmc.engine.kv.block_pool import BlockPool
from llmc.engine.kv.layout import CacheLayout
from llmc.engine.kv.prefix_cache import NO_BLOCK, find_prefix, group_digest, live
from llmc.engine.kv.swap import SwapConfig, Swapper
from llmc.engine.plan import BlockCopy, NewRow, RowWork
from llmc.engine.request import BlockTable, Request
from llmc.image_input import digests_within, start_of_cut_span


@dataclass(frozen=True, slots=True)
class Source:
    """The running request whose first `num_tokens` tokens can be shared, if any. With `wait`, a
    running request has yet to compute them."""

    request: Request | None = None
    num_tokens: int = 0
    wait: bool = False


NO_SOURCE = Source()
# Keys of long and short sequences are never shared. Salts are UTF-8, so none has this byte.
_LONG = b"\xfe"


class RowTable:
    """`num_rows` rows (the smallest free one is used first) over one BlockPool. Without a `layout`
    there is one group of layers, with full attention."""

    def __init__(
        self,
        num_rows: int,
        pool: BlockPool,
        layout: CacheLayout | None = None,
        swap_config: SwapConfig | None = None,
        adapters: AdapterSlots | None = None,
        long_context_from: int | None = None,
    ) -> None:
        self.pool = pool
        self.adapters = adapters
        layout = layout or CacheLayout(block_size=pool.block_size, step_tokens=1)
        self.layout = layout
        self.num_groups = layout.num_groups
        self.is_whole = layout.is_whole
        self.swap = Swapper(swap_config, pool.block_size) if swap_config is not None else None
        self.long_context_from = long_context_from
        self.owners: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows))  # a heap
        self._released: set[int] = set()
        self._refused: tuple[str, int, int, int] | None = None
        self._copies: list[BlockCopy] = []

    @property
    def num_free_rows(self) -> int:
        return len(self._free)

    def position_offset(self, request: Request) -> int:
        """The offset for the request's current length. Once it differs from the request's own, all
        keys must be recomputed (compiler/rotary.py)."""
        long = self.long_context_from
        return long if long is not None and request.num_tokens > long else 0

    def allocate(self, request: Request, num_spare: int, source: Source = NO_SOURCE) -> bool:
        """Give a request a row and blocks, if `num_spare` blocks then stay free in each group.

        The blocks hold all its tokens. With windowed layers they hold those of its first step, and
        the pool must have room for the most blocks that it will hold at a time. Sets `num_computed`
        to the tokens found in the prefix cache, the `source` or host memory, which are never all:
        at least one token must be computed. Its adapter must be ready (adapters.py).
        """
        pool, size, groups = self.pool, self.pool.block_size, self.num_groups
        attempt = (request.request_id, pool.num_free, num_spare, source.num_tokens)
        if attempt == self._refused:  # nothing has changed since: skip the lookups
            return False
        if request.position_offset != (offset := self.position_offset(request)):
            request.position_offset = offset
            request.table.digests = []
            if self.swap is not None:
                self.swap.drop(request)
        shared, num_known = self._find_prefix(request)
        num_published = len(shared) // groups
        num_computed = num_published * size
        parent = source.request if num_computed < source.num_tokens else None
        if parent is not None and parent.position_offset != request.position_offset:
            parent = None
        forked = None if parent is None else self._fork(parent, source.num_tokens)
        if parent is not None and forked is not None:
            num_computed = source.num_tokens
            shared = forked
            num_published = min(parent.table.num_published, num_computed // size)
        num_freed = [self.layout.first_needed(group, num_computed) for group in range(groups)]
        num_last, num_ready = request.num_tokens, num_computed
        saved = self.swap.find(request, num_computed) if self.swap is not None else None
        if saved is not None:
            num_ready, num_freed = saved.num_tokens, list(saved.num_freed)
        if not self.is_whole:
            num_last = min(num_last, num_ready + self.layout.step_tokens)
        # by group and block: whether its tokens have left the window
        places = range(-(-num_last // size) * groups)
        is_gone = [place // groups < num_freed[place % groups] for place in places]
        shared = [NO_BLOCK if is_gone[i] else block for i, block in enumerate(shared)]
        num_new = is_gone[len(shared) :].count(False)
        found = live(shared)
        num_to_come = self.layout.blocks_for(request.num_tokens) - len(found)
        wanted = max(num_new, num_to_come) + num_spare * groups
        if wanted + pool.num_idle(found) > pool.num_free:
            self._refused = attempt
            return False
        pool.share(found)
        snapshot = None
        if pool.snapshots is not None and num_computed:  # before its block can be evicted
            snapshot = pool.snapshots.use(request.table.digests[num_published - 1])
        blocks = shared + [NO_BLOCK if gone else pool.allocate() for gone in is_gone[len(shared) :]]
        if parent is not None and forked is not None and num_computed % size:
            first = len(shared)  # the block in which the shared tokens end, in each group
            pairs = zip(parent.table.blocks[first:], blocks[first : first + groups], strict=False)
            self._copies += [BlockCopy(source=a, target=b) for a, b in pairs]
        request.table = BlockTable(
            blocks=blocks,
            num_freed=num_freed,
            capacity=len(blocks) // groups * size,
            digests=request.table.digests,
            num_published=num_published,
            snapshot=snapshot,
            kept_at=num_computed,
            known_to=num_known * size,
        )
        if self.swap is not None:
            num_computed = self.swap.restore(request, len(shared), num_computed)
        request.num_computed = num_computed
        request.row = heapq.heappop(self._free)
        if self.adapters is not None and request.adapter is not None:
            request.adapter_slot = self.adapters.acquire(request.adapter)
        self.owners[request.row] = request
        self._refused = None
        return True

    def _fork(self, parent: Request, num_tokens: int) -> list[int] | None:
        """The parent's full blocks of its first `num_tokens` tokens that later tokens attend to.
        None if it has already freed some of them.
        """
        groups, num_full = self.num_groups, num_tokens // self.pool.block_size
        shared = parent.table.blocks[: num_full * groups]
        for group in range(groups):
            first = self.layout.first_needed(group, num_tokens)
            if first < parent.table.num_freed[group]:
                return None
            for block in range(min(first, num_full)):
                shared[block * groups + group] = NO_BLOCK
        return shared

    def grow(self, request: Request) -> list[int]:
        """Allocate one more block in each group; the pool must have enough free ones."""
        blocks = [self.pool.allocate() for _ in range(self.num_groups)]
        request.table.blocks += blocks
        request.table.capacity += self.pool.block_size
        return blocks

    def on_full_blocks(self, request: Request, num_computed: int) -> None:
        """More blocks are fully computed: publish them, and free those that have left a window."""
        self.publish(request, num_computed)
        if not self.is_whole:
            self._free_unseen(request, num_computed)

    def _free_unseen(self, request: Request, position: int) -> None:
        """Free the blocks that tokens from `position` on don't attend to. No earlier token may be
        in flight."""
        blocks, groups = request.table.blocks, self.num_groups
        num_freed = request.table.num_freed
        for group in range(groups):
            first = self.layout.first_needed(group, position)
            places = range(num_freed[group] * groups + group, first * groups, groups)
            if places:
                self.pool.free(live(blocks[place] for place in places))
                for place in places:
                    blocks[place] = NO_BLOCK
                num_freed[group] = first

    def free(self, request: Request) -> None:
        """Free the request's row and blocks. No step in flight may use them."""
        assert request.row is not None and request.num_in_flight == 0
        self.pool.free(live(request.table.blocks))
        request.table = BlockTable(digests=request.table.digests)
        if self.adapters is not None and request.adapter is not None:
            self.adapters.release(request.adapter)
        self.owners[request.row] = None
        self._released.add(request.row)
        heapq.heappush(self._free, request.row)
        request.row = None

    # Data for the next plan

    def pop_copies(self) -> list[BlockCopy]:
        """Copies for the requests that were given rows since the last call."""
        copies, self._copies = self._copies, []
        return copies

    def pop_released(self) -> list[int]:
        released = sorted(self._released)
        self._released.clear()
        return released

    def release_again(self, rows: Iterable[int]) -> None:
        """The step that released these rows failed: release those that are still free again."""
        self._released.update(row for row in rows if self.owners[row] is None)

    # Prefix cache

    def publish(self, request: Request, num_computed: int) -> None:
        """Let others share the blocks that are now fully computed. `num_computed` only grows."""
        num_full = num_computed // self.pool.block_size
        if self.pool.enable_prefix_caching:
            self._extend_digests(request, num_full)
            for index in range(request.table.num_published, num_full):
                digest, first = request.table.digests[index], index * self.num_groups
                for group in range(self.num_groups):
                    block = request.table.blocks[first + group]
                    if block != NO_BLOCK:
                        self.pool.publish(block, group_digest(digest, group))
        request.table.num_published = num_full

    def publish_state(self, request: Request, num_computed: int, snapshot: int) -> None:
        """Let others continue from this snapshot of its state. The block that ends there must be
        published already."""
        if self.pool.snapshots is not None:
            last = num_computed // self.pool.block_size - 1
            self.pool.snapshots.publish(snapshot, request.table.digests[last])

    def release_snapshots(self, done: Iterable[RowWork]) -> None:
        """The steps of this work are done: free the snapshots that were not published."""
        for work in done:
            if self.pool.snapshots is not None and work.snapshot is not None:
                self.pool.snapshots.free(work.snapshot)

    def forget(self, request: Request) -> None:
        """Remove what this request has computed from the prefix cache."""
        self.pool.forget(live(request.table.blocks))
        if self.pool.snapshots is not None:
            for digest in request.table.digests:  # the cache may have equal blocks of others
                self.pool.snapshots.drop(digest)

    def _find_prefix(self, request: Request) -> tuple[list[int], int]:
        """The cached blocks that it can share, flat, and how many were found in each group before
        those that it cannot continue from were left out."""
        if not self.pool.enable_prefix_caching or request.needs_scores:
            return [], 0
        groups = self.num_groups
        num_full = (request.num_tokens - 1) // self.pool.block_size
        self._extend_digests(request, num_full)
        digests = request.table.digests[:num_full]
        found = find_prefix(self.pool, self.layout, digests)
        num_known = len(found) // groups
        while (num := self._can_go_on_from(request, len(found) // groups)) * groups < len(found):
            found = find_prefix(self.pool, self.layout, digests[:num])
        return found, num_known

    def _can_go_on_from(self, request: Request, num_found: int) -> int:
        """How many of these blocks to use, so that there is a state snapshot after the last one and
        no image is split."""
        if self.pool.snapshots is not None:
            num_found = self.pool.snapshots.longest(request.table.digests[:num_found])
        if not request.atomic_spans:
            return num_found
        size = self.pool.block_size
        return start_of_cut_span(request.atomic_spans, num_found * size) // size

    def _extend_digests(self, request: Request, num_full: int) -> None:
        size, digests = self.pool.block_size, request.table.digests
        while len(digests) < num_full:
            salt = (_LONG if request.position_offset else b"") + request.cache_salt
            parent = digests[-1] if digests else self.pool.root_digest(salt)
            start = len(digests) * size
            tokens = request.token_ids[start : start + size]
            shown = digests_within(request.images, start, start + size)
            digests.append(self.pool.chain_digest(parent, tokens, shown))

    # Invariants

    def check(self) -> None:
        """Raise AssertionError unless rows and blocks agree. Costs O(num_blocks)."""
        owners = [request for request in self.owners if request is not None]
        self.pool.check(live(request.table.blocks) for request in owners)
        if self.adapters is not None:
            self.adapters.check([request.adapter for request in owners])
        free = [row for row, request in enumerate(self.owners) if request is None]
        if sorted(self._free) != free:
            raise AssertionError(
                f"free rows {sorted(self._free)}, but those without an owner are {free}"
            )
        if not self._released <= set(free):
            raise AssertionError(f"released rows {self._released} are not all free ({free})")
        for request in owners:
            if request.row is None or self.owners[request.row] is not request:
                raise AssertionError(f"{request.request_id!r} does not know its row {request.row}")
            if (
                request.table.capacity * self.num_groups
                != len(request.table.blocks) * self.pool.block_size
            ):
                raise AssertionError(f"{request.request_id!r} miscounts its blocks")


def new_row(request: Request) -> NewRow:
    assert request.row is not None
    return NewRow(
        row=request.row,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        seed=request.seed,
        stop_token_ids=tuple(sorted(request.stop_token_ids)),
        row_state=request.row_state,
        adapter_slot=request.adapter_slot,
        images=request.images,
        position_offset=request.position_offset,
        num_candidates=request.extension.num_candidates if request.extension is not None else 0,
        snapshot=request.table.snapshot,
    )
