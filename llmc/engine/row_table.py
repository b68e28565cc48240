"""RowTable: which request sits in which row, with which blocks. The scheduler's bookkeeper.

The scheduler says who comes and goes; the table finds shared blocks, takes and returns blocks and
rows, and remembers which rows and copies the runner has yet to be told of.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from llmc.engine.block_pool import BlockPool
from llmc.engine.forks import NO_SOURCE, Source
from llmc.engine.plan import BlockCopy, NewRow
from llmc.engine.request import Request
from llmc.engine.swap import Swapper, SwapRoom


class RowTable:
    """`num_rows` rows, smallest free one first, over one BlockPool."""

    def __init__(self, num_rows: int, pool: BlockPool, swap_room: SwapRoom | None = None) -> None:
        self.pool = pool
        self.swap = Swapper(swap_room, pool.block_size)
        self.owners: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows))  # a heap
        self._released: set[int] = set()
        self._refused: tuple[int, int, int, int] | None = None
        self._copies: list[BlockCopy] = []

    @property
    def num_free_rows(self) -> int:
        return len(self._free)

    def seat(self, request: Request, num_spare: int, source: Source = NO_SOURCE) -> bool:
        """Give a request a row and blocks for all its tokens, if `num_spare` blocks stay free.

        Sets `num_computed` to what the prefix cache holds, or the `source`, or host memory: never
        all, one token must be computed.
        """
        pool = self.pool
        attempt = (request.arrival, pool.num_free, num_spare, source.num_tokens)
        if attempt == self._refused:  # nothing has changed since; don't look it all up again
            return False
        shared = self._find_prefix(request)
        num_computed = len(shared) * pool.block_size
        num_published = len(shared)
        giver = source.request if num_computed < source.num_tokens else None
        if giver is not None:
            num_computed = source.num_tokens
            shared = giver.blocks[: num_computed // pool.block_size]
            num_published = min(giver.num_published, len(shared))
        num_new = pool.blocks_for(request.num_tokens) - len(shared)
        if num_new + pool.num_idle(shared) + num_spare > pool.num_free:
            self._refused = attempt
            return False
        pool.share(shared)
        request.blocks = shared + [pool.take() for _ in range(num_new)]
        if giver is not None and num_computed % pool.block_size:
            first = len(shared)
            copy = BlockCopy(source=giver.blocks[first], target=request.blocks[first])
            self._copies.append(copy)
        request.capacity = len(request.blocks) * pool.block_size
        request.num_published = num_published
        request.num_computed = num_computed
        if request.host_slots:
            request.num_computed = self.swap.restore(request, len(shared), num_computed)
        request.row = heapq.heappop(self._free)
        self.owners[request.row] = request
        self._refused = None
        return True

    def grow(self, request: Request) -> int:
        """One more block; the pool must have one free."""
        block = self.pool.take()
        request.blocks.append(block)
        request.capacity += self.pool.block_size
        return block

    def unseat(self, request: Request) -> None:
        """Take row and blocks back. No step in flight may use them."""
        assert request.row is not None and request.num_in_flight == 0
        self.pool.give_back(request.blocks)
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
                self.pool.publish(request.blocks[index], request.digests[index])
        request.num_published = num_full

    def _find_prefix(self, request: Request) -> list[int]:
        if not self.pool.enable_prefix_caching or request.needs_scores:
            return []
        num_full = (request.num_tokens - 1) // self.pool.block_size
        self._extend_digests(request, num_full)
        return self.pool.find_prefix(request.digests[:num_full])

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
        self.pool.check(request.blocks for request in owners)
        free = [row for row, request in enumerate(self.owners) if request is None]
        if sorted(self._free) != free:
            raise AssertionError(f"free rows {sorted(self._free)}, but nobody owns {free}")
        if not self._released <= set(free):
            raise AssertionError(f"released rows {self._released} are not all free ({free})")
        for request in owners:
            if request.row is None or self.owners[request.row] is not request:
                raise AssertionError(f"{request.request_id!r} does not know its row {request.row}")
            if request.capacity != len(request.blocks) * self.pool.block_size:
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
