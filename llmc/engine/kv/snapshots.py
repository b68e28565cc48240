"""StateSnapshots: copies of recurrent states at ends of blocks, for the prefix cache.

A layer's recurrent state is that of a request's newest token, in the slot of its row. A prefix can
be gone on from only where somebody kept a copy, and a copy can be made only where a step ends:

    prompt     [b b b b b b b b|b .]      a step ends after the last full block, one at the end
                               S          after the first the row's state is copied to a snapshot
    next turn  [= = = = = = = =|b b b .]  S is copied to its row before its first step

Kept are the states at the last full block of a prompt, at the block up to which others had computed
the same tokens without a snapshot there (the end of a common system prompt), at ends of a long
prompt's steps as their distance doubles, and at the newest full block of an answer. A snapshot has
the digest of its block and goes with it; beyond that the least recently used one makes room.

Plans run in order, and within a plan states are copied to rows before the step and to snapshots
after it. So a snapshot may be given to another state as soon as that is planned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from llmc.engine.request import Request

LEAST_BLOCKS = 8  # computing fewer again costs less than a step and a snapshot for them


class StateSnapshots:
    """Snapshots 0 .. num_snapshots - 1 by the digest of the block at whose end they were taken."""

    def __init__(self, num_snapshots: int, block_size: int) -> None:
        self.num_snapshots = num_snapshots
        self.block_size = block_size
        self._least_tokens = LEAST_BLOCKS * block_size
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._snapshot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._in_flight: set[int] = set()  # to be filled by steps whose result has not come

    # Find

    def longest(self, digests: Sequence[bytes]) -> int:
        """How many of these blocks the longest prefix with a snapshot has."""
        found = (n for n in range(len(digests), 0, -1) if digests[n - 1] in self._snapshot_of)
        return next(found, 0)

    def use(self, digest: bytes) -> int:
        """The snapshot of this block, which must be there; it was used just now."""
        self._snapshot_of.move_to_end(digest)
        return self._snapshot_of[digest]

    # Where to keep a state

    def stop_at(self, request: Request, end: int) -> int | None:
        """Where a step that could compute the request up to `end` should end, for its state to be
        kept there. None: it keeps none.
        """
        table, size = request.table, self.block_size
        least = max(table.kept_at + self._least_tokens, request.num_computed + 1)
        if least <= table.known_to <= end:
            return table.known_to
        last = (request.num_tokens - 1) // size * size  # who finds it has a token to compute
        stop = min(end // size * size, last)
        if stop < last:
            least = max(least, 2 * table.kept_at)
        return stop if stop >= least else None

    def can_keep_answers(self, num_running: int) -> bool:
        """Whether that leaves half of the snapshots to prompts."""
        return 2 * num_running <= self.num_snapshots

    def take_for_answer(self, request: Request) -> int | None:
        """For the state of a request whose newest token ends a block. That after its block before,
        if it is of the answer too and its step is done, makes room.
        """
        end = request.num_computed
        if end < self._least_tokens:
            return None
        before, digests = end // self.block_size - 2, request.table.digests
        if end - self.block_size > request.num_prompt_tokens and before < len(digests):
            self.drop(digests[before])
        return self.take()

    def take(self) -> int | None:
        """A snapshot for a step to fill. None: steps in flight fill all of them."""
        if not self._free:
            if not self._snapshot_of:
                return None
            self._free.append(self._snapshot_of.popitem(last=False)[1])
        snapshot = self._free.pop()
        self._in_flight.add(snapshot)
        return snapshot

    # The step is done

    def publish(self, snapshot: int, digest: bytes) -> None:
        """It holds the state at the end of this block, unless another one does."""
        if digest not in self._snapshot_of:
            self._in_flight.remove(snapshot)
            self._snapshot_of[digest] = snapshot

    def give_back(self, snapshot: int) -> None:
        """Its step is over: free it, unless it was published."""
        if snapshot in self._in_flight:
            self._in_flight.remove(snapshot)
            self._free.append(snapshot)

    def drop(self, digest: bytes) -> None:
        """Forget the snapshot of this block, if there is one."""
        snapshot = self._snapshot_of.pop(digest, None)
        if snapshot is not None:
            self._free.append(snapshot)

    # Invariants

    def check(self, digests: Container[bytes]) -> None:
        """Raise AssertionError unless each is free, in flight or of a block with such a digest."""
        everywhere = sorted([*self._free, *self._in_flight, *self._snapshot_of.values()])
        if everywhere != list(range(self.num_snapshots)):
            raise AssertionError(f"snapshots are lost or used twice: {everywhere}")
        if any(digest not in digests for digest in self._snapshot_of):
            raise AssertionError("a snapshot's block is not in the prefix cache")

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)
