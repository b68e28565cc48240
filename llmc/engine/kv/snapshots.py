"""StateSnapshots: copies of recurrent states at block boundaries, for the prefix cache.

A row's slot has a layer's recurrent state after the request's newest token only. A prefix can be
continued only where a copy of the state was kept, and a copy can be made only where a step ends:

    prompt     [b b b b b b b b|b .]      a step ends after the last full block, one at the end
                               S          after the first the row's state is copied to a snapshot
    next turn  [= = = = = = = =|b b b .]  S is copied to its row before its first step

States are kept at these places:

- the last full block of a prompt;
- the block up to which other requests had computed the same tokens without keeping a snapshot (the
  end of a common system prompt);
- ends of a long prompt's steps, at doubling distances;
- the newest full block of an answer.

A snapshot has the digest of its block and is dropped with it. When all are in use, the least
recently used one is evicted.

Plans run in order, and within a plan states are copied to rows before the step and to snapshots
after it. So a snapshot can be reused as soon as the copy that overwrites it is planned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from llmc.engine.request import Request

LEAST_BLOCKS = 8  # recomputing fewer costs less than an additional step and a snapshot


class StateSnapshots:
    """Snapshots 0 .. num_snapshots - 1, keyed by the digest of the block that ends there."""

    def __init__(self, num_snapshots: int, block_size: int) -> None:
        self.num_snapshots = num_snapshots
        self.block_size = block_size
        self._least_tokens = LEAST_BLOCKS * block_size
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._snapshot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._in_flight: set[int] = set()  # to be filled by steps in flight

    # Find

    def longest(self, digests: Sequence[bytes]) -> int:
        """Length, in blocks, of the longest prefix with a snapshot."""
        found = (n for n in range(len(digests), 0, -1) if digests[n - 1] in self._snapshot_of)
        return next(found, 0)

    def use(self, digest: bytes) -> int:
        """The snapshot of this block, which must exist. Marks it as the most recently used."""
        self._snapshot_of.move_to_end(digest)
        return self._snapshot_of[digest]

    # Where to keep a state

    def stop_at(self, request: Request, end: int) -> int | None:
        """Where to end a step that could compute up to `end`, so that the state can be kept there.

        None: keep no state.
        """
        table, size = request.table, self.block_size
        least = max(table.kept_at + self._least_tokens, request.num_computed + 1)
        if least <= table.known_to <= end:
            return table.known_to
        last = (request.num_tokens - 1) // size * size  # leaves a token to compute after a hit
        stop = min(end // size * size, last)
        if stop < last:
            least = max(least, 2 * table.kept_at)
        return stop if stop >= least else None

    def can_keep_answers(self, num_running: int) -> bool:
        """Whether keeping answers' states leaves half of the snapshots for prompts."""
        return 2 * num_running <= self.num_snapshots

    def take_for_answer(self, request: Request) -> int | None:
        """Allocate a snapshot for the state of a request whose newest token ends a block.

        Replaces that of the previous block, if it belongs to the answer and its step is done.
        """
        end = request.num_computed
        if end < self._least_tokens:
            return None
        before, digests = end // self.block_size - 2, request.table.digests
        if end - self.block_size > request.num_prompt_tokens and before < len(digests):
            self.drop(digests[before])
        return self.take()

    def take(self) -> int | None:
        """Allocate a snapshot for a step to fill. None if steps in flight are filling them all."""
        if not self._free:
            if not self._snapshot_of:
                return None
            self._free.append(self._snapshot_of.popitem(last=False)[1])
        snapshot = self._free.pop()
        self._in_flight.add(snapshot)
        return snapshot

    # The step is done

    def publish(self, snapshot: int, digest: bytes) -> None:
        """Register it as the state at the end of this block, unless another snapshot is."""
        if digest not in self._snapshot_of:
            self._in_flight.remove(snapshot)
            self._snapshot_of[digest] = snapshot

    def free(self, snapshot: int) -> None:
        """Its step is done: free it, unless it was published."""
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
        """Raise AssertionError unless each is free, in flight or belongs to one of `digests`."""
        everywhere = sorted([*self._free, *self._in_flight, *self._snapshot_of.values()])
        if everywhere != list(range(self.num_snapshots)):
            raise AssertionError(f"snapshots are lost or used twice: {everywhere}")
        if any(digest not in digests for digest in self._snapshot_of):
            raise AssertionError("a snapshot's block is not in the prefix cache")

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)
