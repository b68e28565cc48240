"""Grammar: the engine's side of structured outputs. Masks before draws, tokens after them.

    add --Grammars.begin--> compiled in another thread --GrammarQueue--> scheduler
    StepPlan.row_masks <--Matcher.mask--   --Matcher.accept--> StepResult's tokens

What reads grammars is given to the engine from outside. A matcher belongs to its request, not to
a row, and so outlives preemption. It has seen exactly the tokens that the host knows; a request
with a matcher is therefore planned only when none of its draws is in flight.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from llmc.engine.messages import RequestUpdate
from llmc.engine.plan import RowMask, RowWork, TokenLogprobs
from llmc.engine.request import Extension, Request
from llmc.errors import InvalidRequestError
from llmc.structured_outputs import StructuredOutputs

IDLE_WAIT_S = 0.05  # for a grammar, while there is nothing else to do


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


class Constraint(Extension):
    """A request's matcher and the mask of its next draw."""

    no_token_error = (
        "no token was left to draw: what structured_outputs allows next is banned by bad_words, "
        "logit_bias, min_tokens or stop_token_ids, or the model's logits were not finite"
    )

    def __init__(self, matcher: Matcher) -> None:
        """Raises InvalidRequestError if the matcher can't start."""
        self._matcher = matcher
        try:
            self._mask = matcher.mask()
        except Exception as error:  # of a third-party library: any of them ends one request
            raise InvalidRequestError(_describe(error), param="structured_outputs") from error

    def is_ready(self, request: Request) -> bool:
        return request.num_tokens == len(request.token_ids)

    def on_draw(self, request: Request, work: RowWork, masks: list[RowMask]) -> None:
        masks.append(RowMask(row=work.row, words=self._mask))

    def on_token(
        self, request: Request, token: int, logprob: TokenLogprobs | None
    ) -> RequestUpdate:
        try:
            self._matcher.accept(token)
            is_complete = self._matcher.is_complete
            if not is_complete:
                self._mask = self._matcher.mask()
        except Exception as error:
            return request.ended("error", _describe(error))
        update = request.append(token, logprob)
        if is_complete and update.finish_reason != "stop":
            update.finish_reason, update.is_whole = "stop", True
        return update


def _describe(error: Exception) -> str:
    return f"structured_outputs can't go on: {error or type(error).__name__}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that waits for its grammar."""

    request: Request
    fork_of: str | None
    matcher: Future[Any]


class GrammarQueue:
    """Requests whose grammars are being compiled, in the order of arrival."""

    def __init__(self) -> None:
        self._arrivals: dict[str, Arrival] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arrivals

    def add(self, arrival: Arrival) -> None:
        self._arrivals[arrival.request.request_id] = arrival

    def remove(self, request_id: str) -> Request | None:
        arrival = self._arrivals.pop(request_id, None)
        if arrival is None:
            return None
        arrival.matcher.cancel()
        return arrival.request

    def pop_ready(self, *, may_wait: bool) -> list[Arrival]:
        """Those whose grammars are compiled; with `may_wait` it waits a moment for the first."""
        if may_wait:
            futures = [arrival.matcher for arrival in self._arrivals.values()]
            wait(futures, IDLE_WAIT_S, return_when=FIRST_COMPLETED)
        ready = [arrival for arrival in self._arrivals.values() if arrival.matcher.done()]
        for arrival in ready:
            del self._arrivals[arrival.request.request_id]
        return ready
