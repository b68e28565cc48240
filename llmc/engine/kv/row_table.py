"""RowTable: which request sits in which row, with which blocks. The scheduler's bookkeeper.

The scheduler says who comes and goes; the table finds shared blocks, takes and returns blocks and
rows, and remembers which rows and copies the runner has yet to be told of.

`Request.blocks` is flat: a physical block of each group of layers for the first block of tokens,
then for the next. NO_BLOCK stands where a windowed group has none any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from llmc.engine.kv.block_pool import BlockPool
from llmc.engine.kv.layout import CacheLayout
from llmc.engine.kv.prefix_cache import NO_BLOCK, find_prefix, group_digest, live
from llmc.engine.kv.swap import Swapper, SwapRoom
from llmc.engine.parallel_sampling import NO_SOURCE, Source
from llmc.engine.plan import BlockCopy, NewRow
from llmc.engine.request import Request


class RowTable:
    """`num_rows` rows, smallest free one first, over one BlockPool. Without a `layout` there is one
    group of layers, which see the whole text."""

    def __init__(
        self,
        num_rows: int,
        pool: BlockPool,
        layout: CacheLayout | None = None,
        swap_room: SwapRoom | None = None,
    ) -> None:
        self.pool = pool
        layout = layout or CacheLayout(block_size=pool.block_size, step_tokens=1)
        self.layout = layout
        self.num_groups = layout.num_groups
        self.is_whole = layout.is_whole
        self.swap = Swapper(swap_room, pool.block_size)
        self.owners: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows))  # a heap
        self._released: set[int] = set()
        self._refused: tuple[int, int, int, int] | None = None
        self._copies: list[BlockCopy] = []

    @property
    def num_free_rows(self) -> int:
        return len(self._free)

    def allocate(self, request: Request, num_spare: int, source: Source = NO_SOURCE) -> bool:
        """Give a request a row and blocks, if then `num_spare` blocks stay free in each group.

        They hold all its tokens; where layers see a window only, those of its first step, and
        there must be room for as many as it will ever hold at a time.
        Sets `num_computed` to what the prefix cache holds, or the `source`, or host memory: never
        all, one token must be computed.
        """
        pool, size, groups = self.pool, self.pool.block_size, self.num_groups
        attempt = (request.arrival, pool.num_free, num_spare, source.num_tokens)
        if attempt == self._refused:  # nothing has changed since; don't look it all up again
            return False
        shared = self._find_prefix(request)
        num_published = len(shared) // groups
        num_computed = num_published * size
        giver = source.request if num_computed < source.num_tokens else None
        forked = None if giver is None else self._fork(giver, source.num_tokens)
        if giver is not None and forked is not None:
            num_computed = source.num_tokens
            shared = forked
            num_published = min(giver.num_published, num_computed // size)
        num_last = request.num_tokens
        if not self.is_whole:
            num_last = min(num_last, num_computed + self.layout.step_tokens)
        num_new = -(-num_last // size) * groups - len(shared)
        held = live(shared)
        num_to_come = self.layout.blocks_for(request.num_tokens) - len(held)
        wanted = max(num_new, num_to_come) + num_spare * groups
        if wanted + pool.num_idle(held) > pool.num_free:
            self._refused = attempt
            return False
        pool.share(held)
        request.blocks = shared + [pool.take() for _ in range(num_new)]
        first_needed = self.layout.first_needed
        request.num_dropped = [first_needed(group, num_computed) for group in range(groups)]
        if giver is not None and forked is not None and num_computed % size:
            first = len(shared)
            pairs = zip(giver.blocks[first:], request.blocks[first : first + groups], strict=False)
            self._copies += [BlockCopy(source=a, target=b) for a, b in pairs]
        request.capacity = len(request.blocks) // groups * size
        request.num_published = num_published
        request.num_computed = num_computed
        if request.host_slots:
            request.num_computed = self.swap.restore(request, len(shared), num_computed)
        request.row = heapq.heappop(self._free)
        self.owners[request.row] = request
        self._refused = None
        return True

    def _fork(self, giver: Request, num_tokens: int) -> list[int] | None:
        """Its full blocks that a token behind the first `num_tokens` sees. None: it has moved on,
        and has given back some of them.
        """
        groups, num_full = self.num_groups, num_tokens // self.pool.block_size
        shared = giver.blocks[: num_full * groups]
        for group in range(groups):
            first = self.layout.first_needed(group, num_tokens)
            if first < giver.num_dropped[group]:
                return None
            for block in range(min(first, num_full)):
                shared[block * groups + group] = NO_BLOCK
        return shared

    def grow(self, request: Request) -> list[int]:
        """One more block in each group; the pool must have them free."""
        blocks = [self.pool.take() for _ in range(self.num_groups)]
        request.blocks += blocks
        request.capacity += self.pool.block_size
        return blocks

    def drop_unseen(self, request: Request, position: int) -> None:
        """Give back the blocks that no token from `position` on sees; none before is in flight."""
        blocks, groups = request.blocks, self.num_groups
        for group in range(groups):
            first = self.layout.first_needed(group, position)
            places = range(request.num_dropped[group] * groups + group, first * groups, groups)
            if places:
                self.pool.give_back(live(blocks[place] for place in places))
                for place in places:
                    blocks[place] = NO_BLOCK
                request.num_dropped[group] = first

    def free(self, request: Request) -> None:
        """Take row and blocks back. No step in flight may use them."""
        assert request.row is not None and request.num_in_flight == 0
        self.pool.give_back(live(request.blocks))
        request.blocks = []
        self.owners[request.row] = None
        self._released.add(request.row)
        heapq.heappush(self._free, request.row)
        request.row = None

    # What the runner must hear of

    def pop_copies(self) -> list[BlockCopy]:
        """Copies that those who were seated since the last call need."""
        copies, self._copies = self._copies, []
        return copies

    def pop_released(self) -> list[int]:
        released = sorted(self._released)
        self._released.clear()
        return released

    def release_again(self, rows: Iterable[int]) -> None:
        """The step that carried this news failed; repeat it for the rows that are still free."""
        self._released.update(row for row in rows if self.owners[row] is None)

    # Prefix cache

    def publish(self, request: Request, num_computed: int) -> None:
        """Let others share the blocks that are now computed to the end; the count only grows."""
        num_full = num_computed // self.pool.block_size
        if self.pool.enable_prefix_caching:
            self._extend_digests(request, num_full)
            for index in range(request.num_published, num_full):
                digest, first = request.digests[index], index * self.num_groups
                for group in range(self.num_groups):
                    block = request.blocks[first + group]
                    if block != NO_BLOCK:
                        self.pool.publish(block, group_digest(digest, group))
        request.num_published = num_full

    def _find_prefix(self, request: Request) -> list[int]:
        if not self.pool.enable_prefix_caching or request.needs_scores:
            return []
        num_full = (request.num_tokens - 1) // self.pool.block_size
        self._extend_digests(request, num_full)
        return find_prefix(self.pool, self.layout, request.digests[:num_full])

    def _extend_digests(self, request: Request, num_full: int) -> None:
        size, digests = self.pool.block_size, request.digests
        while len(digests) < num_full:
            parent = digests[-1] if digests else self.pool.root_digest(request.cache_salt)
            start = len(digests) * size
            tokens = request.token_ids[start : start + size]
            digests.append(self.pool.chain_digest(parent, tokens))

    # Invariants

    def check(self) -> None:
        """Raise AssertionError unless rows and blocks agree. Costs O(num_blocks)."""
        owners = [request for request in self.owners if request is not None]
        self.pool.check(live(request.blocks) for request in owners)
        free = [row for row, request in enumerate(self.owners) if request is None]
        if sorted(self._free) != free:
            raise AssertionError(f"free rows {sorted(self._free)}, but nobody owns {free}")
        if not self._released <= set(free):
            raise AssertionError(f"released rows {self._released} are not all free ({free})")
        for request in owners:
            if request.row is None or self.owners[request.row] is not request:
                raise AssertionError(f"{request.request_id!r} does not know its row {request.row}")
            if request.capacity * self.num_groups != len(request.blocks) * self.pool.block_size:
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
        num_candidates=request.beam.search.num_candidates if request.beam is not None else 0,
    )
