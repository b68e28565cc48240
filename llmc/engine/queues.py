"""Queues: the running and waiting requests, and all transitions between the two.

    waiting --admit--> running --preempt, reset--> waiting
               either of them --finish--> gone

A request that stops running may still be in a step in flight. Its row and blocks are freed when
the last of these steps is done (`release`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection
from operator import attrgetter

from llmc.engine.adapters import Readiness
from llmc.engine.kv.row_table import RowTable
from llmc.engine.request import Request, RequestState

RUNNING = RequestState.RUNNING
PREEMPTED = RequestState.PREEMPTED
FINISHED = RequestState.FINISHED

_rank = attrgetter("rank")


class RankedQueue(list[Request]):
    """A list sorted by rank, (priority, arrival), if only changed by `insert_ranked` and `discard`.

    If all priorities are 0, the order is first come, first served."""

    def insert_ranked(self, request: Request) -> None:
        if not self or self[-1].rank < request.rank:  # nearly always
            self.append(request)
        else:
            insort(self, request, key=_rank)

    def discard(self, request: Request) -> None:
        index = bisect_left(self, request.rank, key=_rank)
        if index == len(self) or self[index] is not request:
            raise ValueError(f"request {request.request_id!r} is not in this queue")
        del self[index]

    @property
    def is_sorted(self) -> bool:
        return all(a.rank < b.rank for a, b in zip(self, self[1:], strict=False))


class Queues:
    """The running and waiting requests of one RowTable."""

    def __init__(self, rows: RowTable) -> None:
        self.rows = rows
        self.running = RankedQueue()
        self.waiting = RankedQueue()
        self.num_preemptions = 0
        self._num_leaving = 0  # requests that hold a row but no longer run

    def admit(self, request: Request) -> None:
        """Move a waiting request that was given a row to the running ones."""
        self.waiting.discard(request)
        self.running.insert_ranked(request)
        request.state = RUNNING

    def make_room(self, request: Request) -> bool:
        """Free a block for each group of layers, preempting if necessary.

        Returns False if that is not possible in this step. The request may preempt itself, but none
        of better rank.
        """
        while self.rows.pool.num_free < self.rows.num_groups:
            if self._num_leaving:  # their blocks are freed when the steps in flight are done
                return False
            victim = self.running[-1]
            if victim is request and request.num_in_flight:  # it may finish and free blocks itself
                return False
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt_for(self, request: Request) -> None:
        """Preempt a request of worse priority, if any, for the first in the queue, which found no
        row or block.

        Only one per step: the request tries again before another one is preempted.
        """
        if self._num_leaving or not self.running:
            return
        victim = self.running[-1]
        if request.rank[0] < victim.rank[0]:
            self.preempt(victim)

    def allocate_by_preemption(self, request: Request, protected: Collection[str]) -> bool:
        """Give a request a row and blocks, preempting any but the protected ids if necessary."""
        while not (self.rows.num_free_rows and self.rows.allocate(request, 0)):
            others = (r for r in reversed(self.running) if r.request_id not in protected)
            victim = next(others, None)
            if victim is None:
                return False
            self.preempt(victim)
        return True

    def prepare_by_preemption(self, request: Request, protected: Collection[str]) -> bool:
        """Load the request's adapter into a slot, preempting any but the protected ids if
        necessary. Returns False if it is still loading, or if protected requests use all slots."""
        adapters = self.rows.adapters
        if adapters is None or request.adapter is None:
            return True
        while (ready := adapters.prepare(request.adapter)) is Readiness.NO_SLOT:
            others = (r for r in reversed(self.running) if r.request_id not in protected)
            victim = next((r for r in others if r.adapter is not None), None)
            if victim is None:
                return False
            self.preempt(victim)
        return ready is Readiness.READY

    def preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        request.num_preemptions += 1
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """Move a running request back to the waiting ones and free its row and blocks."""
        if request.state is RUNNING:
            self._move_to_waiting(request)
            self._leave(request)

    def reset(self, request: Request) -> None:
        """After a failed step, make the request recompute everything from its known tokens."""
        if request.row is None:
            return  # already reset for an earlier one of the failed steps
        request.num_in_flight = 0
        request.num_tokens = len(request.token_ids)
        if request.state is RUNNING:
            self._move_to_waiting(request)
        else:
            self._num_leaving -= 1
        self.rows.free(request)

    def finish(self, request: Request) -> None:
        was_running = request.state is RUNNING
        request.state = FINISHED
        if self.rows.swap is not None:
            self.rows.swap.drop(request)
        if was_running:
            self.running.discard(request)
            self._leave(request)
        else:
            self.waiting.discard(request)

    def release(self, request: Request) -> None:
        """Free a request that no longer runs, now that the last step that used it is done."""
        if request.row is not None:
            self._num_leaving -= 1
            self._free(request)

    def _move_to_waiting(self, request: Request) -> None:
        self.running.discard(request)
        self.waiting.insert_ranked(request)
        request.state = PREEMPTED

    def _leave(self, request: Request) -> None:
        if request.num_in_flight:
            self._num_leaving += 1
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        swap = self.rows.swap
        # The blocks of a shared prompt stay on the device: nothing to swap out.
        if swap is not None and request.state is PREEMPTED and request.siblings is None:
            swap.save(request)
        self.rows.free(request)

    def violations(self) -> list[str]:
        """The violated invariants. Raises AssertionError for those of rows and blocks."""
        self.rows.check()
        if self.rows.swap is not None:
            self.rows.swap.check(self.waiting)
        owners = [request for request in self.rows.owners if request is not None]
        leaving = [request for request in owners if request.state is not RUNNING]
        rules = {
            "running requests own rows": len(owners) - len(leaving) == len(self.running),
            "other owners of rows are in flight": all(r.num_in_flight for r in leaving),
            "leaving requests are counted": len(leaving) == self._num_leaving,
            "queues are sorted by rank": self.running.is_sorted and self.waiting.is_sorted,
        }
        return [rule for rule, holds in rules.items() if not holds]
