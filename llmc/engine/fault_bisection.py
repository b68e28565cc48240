"""FaultBisection: finds the request that makes a step fail, so that only that one is ended.

A step that raises does not say which request is the cause. Its requests become a group of suspects
that runs in isolation. Each is recomputed up to its work in the failed step, and then repeats that
work.

    failed step --> [A B C D] --fails again--> [A B] [C D] --fails--> [A] [B] [C D] ...

A suspect that gets past its work is cleared. A group that fails is split in two; if a group of one
fails, that request is the culprit. Every failure makes a group smaller, so the search terminates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.engine.plan import RowWork
from llmc.engine.request import Request


@dataclass(frozen=True, slots=True)
class Suspect:
    """A request, and its work [start, end) in the step that failed."""

    request: Request
    start: int
    end: int

    @property
    def num_wanted(self) -> int:
        """How many tokens to compute next: those up to the work, or the work itself.

        One token is enough if the prefix cache already covers all of it.
        """
        done = self.request.num_computed
        return self.start - done if done < self.start else max(self.end - done, 1)


class FaultBisection:
    """A stack of groups of suspects; the top group runs in isolation until it is empty."""

    def __init__(self) -> None:
        self.groups: list[list[Suspect]] = []  # none: nothing is being searched

    @property
    def group(self) -> list[Suspect]:
        """The suspects that can be scheduled now."""
        return list(self.groups[-1])

    @property
    def members(self) -> list[Request]:
        return [suspect.request for group in self.groups for suspect in group]

    def on_failure(self, failed: Sequence[tuple[Request, RowWork]]) -> Request | None:
        """Record a failed step's requests. Returns the culprit if only one request can be it.

        A suspect must get past its work in the first step that failed.
        """
        found_again = bool(self.groups)
        known = {s.request.request_id: s for s in (self.groups.pop() if found_again else ())}
        suspects = []
        for request, work in failed:
            if not request.is_finished:
                end = work.start + work.num_tokens - len(work.draft_token_ids)
                new = Suspect(request, work.start, end)
                suspects.append(known.pop(request.request_id, new))
        self._push(list(known.values()))  # suspects for which the step had no room
        # If it had draft tokens, run it again without: they may have been the cause.
        if len(failed) == len(suspects) == 1 and not failed[0][1].draft_token_ids:
            return suspects[0].request
        # If one of them has ended by now, it may have been the cause: rerun the others unsplit.
        middle = len(suspects) // 2 if found_again and len(suspects) == len(failed) else 0
        self._push(suspects[middle:])
        self._push(suspects[:middle])
        return None

    def on_success(self, done: Sequence[tuple[Request, RowWork]]) -> None:
        """Clear those requests of a successful step that are past their work."""
        for request, work in done:
            group = self.groups[-1] if self.groups else ()
            suspect = next((s for s in group if s.request is request), None)
            if suspect is not None and work.start + work.num_tokens >= suspect.end:
                self.drop(request)

    def drop(self, request: Request) -> None:
        """Remove a request from the suspects, if it is one."""
        groups = ([s for s in group if s.request is not request] for group in self.groups)
        self.groups = [group for group in groups if group]

    def _push(self, group: list[Suspect]) -> None:
        if group:
            self.groups.append(group)
