"""RankedQueue: requests in the order in which they are served. The scheduler's two queues.

A rank is (priority, arrival); lower goes first. First come, first served is the rank with every
priority 0. Almost everybody enters at the end, so that costs one comparison.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from llmc.engine.request import Request

_rank = attrgetter("rank")


class RankedQueue(list[Request]):
    """A list that stays sorted by rank as long as it is changed through `enter` and `leave`."""

    def enter(self, request: Request) -> None:
        if not self or self[-1].rank < request.rank:
            self.append(request)
        else:
            insort(self, request, key=_rank)

    def leave(self, request: Request) -> None:
        index = bisect_left(self, request.rank, key=_rank)
        if index == len(self) or self[index] is not request:
            raise ValueError(f"request {request.request_id!r} is not in this queue")
        del self[index]

    @property
    def is_sorted(self) -> bool:
        return all(a.rank < b.rank for a, b in zip(self, self[1:], strict=False))
