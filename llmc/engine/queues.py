"""Queues: who runs, who waits, and every way from the one to the other.

    waiting --enter--> running --preempt, start_over--> waiting
                  any of them --finish--> gone

Whoever stops running may still be in a step in flight; row and blocks are given back when the last
such step is done (`settle`).
"""

from __future__ import annotations

from collections.abc import Collection

from llmc.engine.kv.row_table import RowTable
from llmc.engine.ranked import RankedQueue
from llmc.engine.request import Request, RequestState

RUNNING = RequestState.RUNNING
PREEMPTED = RequestState.PREEMPTED
FINISHED = RequestState.FINISHED


class Queues:
    """The two queues over the rows of one RowTable. The scheduler says who moves."""

    def __init__(self, rows: RowTable) -> None:
        self.rows = rows
        self.running = RankedQueue()
        self.waiting = RankedQueue()
        self.num_preemptions = 0
        self._num_leaving = 0  # requests off the running list that still hold a row

    def enter(self, request: Request) -> None:
        """A waiting request was given a row."""
        self.waiting.leave(request)
        self.running.enter(request)
        request.state = RUNNING

    def make_room(self, request: Request) -> bool:
        """See that a block a group is free, preempting if need be. False: not in this step.

        A victim goes back to the queue, and needs at least what it just gave up; this step lets
        it in again only if others hold by now what it needs.
        """
        while self.rows.pool.num_free < self.rows.num_groups:
            if self._num_leaving:  # blocks come back with the step in flight; wait for them
                return False
            victim = self.running[-1]
            if victim is request and request.num_in_flight:  # its own may come back too
                return False
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def make_way(self, request: Request) -> None:
        """The next in line found no row or block: one of worse priority gives up its own.

        One at a time: the request tries again before another has to.
        """
        if self._num_leaving or not self.running:
            return
        victim = self.running[-1]
        if request.rank[0] < victim.rank[0]:
            self.preempt(victim)

    def allocate_by_preemption(self, request: Request, protected: Collection[str]) -> bool:
        """Give a request a row, preempting all but the protected ids if need be."""
        while not (self.rows.num_free_rows and self.rows.allocate(request, 0)):
            others = (r for r in reversed(self.running) if r.request_id not in protected)
            victim = next(others, None)
            if victim is None:
                return False
            self.preempt(victim)
        return True

    def preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.turn_back(request)

    def turn_back(self, request: Request) -> None:
        """It goes on from other tokens: what it computed is of no use. No step uses it now."""
        if request.state is RUNNING:
            self._requeue(request)
            self._leave(request)

    def start_over(self, request: Request) -> None:
        """Back to what the host has seen: the tokens stay, whatever was computed goes."""
        if request.row is None:
            return  # it was in an earlier one of the void steps too
        request.num_in_flight = request.num_guessed = 0
        request.num_tokens = len(request.token_ids)
        if request.state is RUNNING:
            self._requeue(request)
        else:
            self._num_leaving -= 1
        self.rows.free(request)

    def finish(self, request: Request) -> None:
        was_running = request.state is RUNNING
        request.state = FINISHED
        self.rows.swap.drop(request)
        if was_running:
            self.running.leave(request)
            self._leave(request)
        else:
            self.waiting.leave(request)

    def settle(self, request: Request) -> None:
        """The last step that used a request that left is done."""
        if request.row is not None:
            self._num_leaving -= 1
            self._free(request)

    def _requeue(self, request: Request) -> None:
        self.running.leave(request)
        self.waiting.enter(request)
        request.state = PREEMPTED

    def _leave(self, request: Request) -> None:
        if request.num_in_flight:
            self._num_leaving += 1
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        if request.state is PREEMPTED:
            self.rows.swap.save(request)
        self.rows.free(request)

    def broken_rules(self) -> list[str]:
        """What does not hold of queues and rows. Raises AssertionError for the rows' own books."""
        self.rows.check()
        self.rows.swap.check(self.waiting)
        owners = [request for request in self.rows.owners if request is not None]
        leaving = [request for request in owners if request.state is not RUNNING]
        rules = {
            "running requests own rows": len(owners) - len(leaving) == len(self.running),
            "who left and owns a row is in flight": all(r.num_in_flight for r in leaving),
            "leaving requests are counted": len(leaving) == self._num_leaving,
            "queues are sorted by rank": self.running.is_sorted and self.waiting.is_sorted,
        }
        return [rule for rule, holds in rules.items() if not holds]
