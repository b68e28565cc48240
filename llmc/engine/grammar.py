"""Grammar: the engine's side of structured outputs. Masks before draws, tokens after them.

    add --Grammars.begin--> compiled beside the engine's thread --GrammarQueue--> scheduler
    StepPlan.row_masks <--Request.mask-- mask() <--accept(token)-- StepResult

What reads grammars is given to the engine from outside. A matcher belongs to its request, not to
a row, and so outlives preemption. It has seen exactly the tokens that the host has; a row with a
matcher is therefore planned only when no draw of it is in flight.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from llmc.engine.request import Request
from llmc.structured_outputs import StructuredOutputs

IDLE_WAIT_S = 0.05  # for a grammar, while nothing else is to be done


class Matcher(Protocol):
    """Follows one sequence. Any exception of it ends the request."""

    def mask(self) -> bytes:
        """The tokens that may come next, as in RowMask.words."""

    def accept(self, token: int, /) -> None:
        """`token` was drawn."""

    @property
    def is_complete(self) -> bool:
        """Nothing but an end token can follow."""


class Grammars(Protocol):
    """Makes matchers; several threads may ask."""

    def begin(self, spec: StructuredOutputs, /) -> Future[Any]:
        """A Matcher at the start of an output, perhaps later. Fails with InvalidRequestError for
        a grammar that is wrong."""


def start_matching(request: Request, matcher: Matcher) -> str | None:
    """Give a request its matcher. -> what went wrong, if anything did."""
    request.matcher, request.needs_known_token = matcher, True
    return _next_mask(request, matcher)


def follow(request: Request, token: int) -> str | None:
    """A token was drawn under the request's mask. -> why it can't go on, if it can't."""
    matcher = request.matcher
    assert matcher is not None
    try:
        matcher.accept(token)
        is_complete = matcher.is_complete
    except Exception as error:  # of a foreign library: whatever it is, one request ends
        return _problem(error)
    if is_complete:
        request.mask = None  # nothing will be drawn
        return None
    return _next_mask(request, matcher)


def _next_mask(request: Request, matcher: Matcher) -> str | None:
    try:
        request.mask = matcher.mask()
    except Exception as error:
        return _problem(error)
    return None


def _problem(error: Exception) -> str:
    return f"structured_outputs can't go on: {error or type(error).__name__}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that waits for its grammar."""

    request: Request
    fork_of: str | None
    matcher: Future[Any]


class GrammarQueue:
    """Requests whose grammars are being compiled; they are let in in the order they came."""

    def __init__(self) -> None:
        self._arrivals: dict[str, Arrival] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arrivals

    def enter(self, arrival: Arrival) -> None:
        self._arrivals[arrival.request.request_id] = arrival

    def leave(self, request_id: str) -> Request | None:
        arrival = self._arrivals.pop(request_id, None)
        if arrival is None:
            return None
        arrival.matcher.cancel()
        return arrival.request

    def take_ready(self, *, may_wait: bool) -> list[Arrival]:
        """Those whose grammars are there; with `may_wait` it waits a moment for the first one."""
        if may_wait:
            futures = [arrival.matcher for arrival in self._arrivals.values()]
            wait(futures, IDLE_WAIT_S, return_when=FIRST_COMPLETED)
        ready = [arrival for arrival in self._arrivals.values() if arrival.matcher.done()]
        for arrival in ready:
            del self._arrivals[arrival.request.request_id]
        return ready
