"""FaultBisection: finds the request that makes a step fail, so that it alone ends.

A step that raises does not say whose fault it is. Its requests become a group of suspects that is
run alone: each is recomputed up to the work that it had in the failed step, then does that work.

    failed step --accuse--> [A B C D] --fails again--> [A B] [C D] --fails--> [A] [B] [C D] ...

Whoever gets past its work is cleared; a group that fails is split in two; a group of one that
fails has found the culprit. Every failure makes a group smaller, so the search ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmc.engine.plan import RowWork
from llmc.engine.request import Request


@dataclass(frozen=True, slots=True)
class Suspect:
    """A request, and the work [start, end) that it had in the step that failed."""

    request: Request
    start: int
    end: int

    @property
    def num_wanted(self) -> int:
        """How many tokens to compute next: up to the work, or the work itself.

        The prefix cache may have brought the request past all of it; one token then shows that
        it runs.
        """
        done = self.request.num_computed
        if done < self.start:
            return self.start - done
        return max(self.end - done, 1)


class FaultBisection:
    """Groups of suspects; the last one is run, alone, until it is empty."""

    def __init__(self) -> None:
        self._groups: list[list[Suspect]] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def group(self) -> list[Suspect]:
        """Whoever may be scheduled now."""
        return list(self._groups[-1])

    @property
    def members(self) -> Iterator[Request]:
        return (suspect.request for group in self._groups for suspect in group)

    def accuse(self, failed: Sequence[tuple[Request, RowWork]]) -> Request | None:
        """These were in a step that failed. Returns the culprit when only one can be it.

        The work of the first failure stays what a suspect has to get past.
        """
        found_again = bool(self._groups)
        known = {s.request.request_id: s for s in (self._groups.pop() if found_again else ())}
        accused = []
        for request, work in failed:
            if not request.is_finished:
                num_known = work.num_tokens - len(work.draft_token_ids)
                fresh = Suspect(request, work.start, work.start + num_known)
                accused.append(known.pop(request.request_id, fresh))
        self._push(list(known.values()))  # those whose turn in the group had not come
        # One with guesses runs once more without: they may have been what was wrong.
        if len(failed) == len(accused) == 1 and not failed[0][1].draft_token_ids:
            return accused[0].request
        # Where one of them has ended by now it may have been that one: the others run once more.
        middle = len(accused) // 2 if found_again and len(accused) == len(failed) else 0
        self._push(accused[middle:])
        self._push(accused[:middle])
        return None

    def pass_by(self, request: Request, num_computed: int) -> None:
        """A step that computed a request up to here went well; it may be cleared by that."""
        group = self._groups[-1] if self._groups else ()
        suspect = next((s for s in group if s.request is request), None)
        if suspect is not None and num_computed >= suspect.end:
            self.drop(request)

    def drop(self, request: Request) -> None:
        """It is no suspect (any more)."""
        groups = ([s for s in group if s.request is not request] for group in self._groups)
        self._groups = [group for group in groups if group]

    def _push(self, group: list[Suspect]) -> None:
        if group:
            self._groups.append(group)
