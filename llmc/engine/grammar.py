"""Grammar: the engine's side of structured outputs. Masks before draws, tokens after them.

    add --Grammars.begin--> compiled in another thread --Constraint.start--> scheduled
    StepPlan.row_masks <--Matcher.mask--   Matcher.accept <-- StepResult.token_ids

What reads grammars is given to the engine from outside. A matcher belongs to its request, not to
a row, and so outlives preemption. It has seen exactly the tokens that the host knows; a request
with a matcher is therefore planned only when none of its draws is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from llmc.engine.messages import RequestUpdate
from llmc.engine.plan import RowMask, RowWork, TokenLogprobs
from llmc.engine.request import Extension, Request
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
    """A request's matcher, once its grammar is compiled, and the mask of the next draw.

    A request whose grammar is being compiled waits; those behind it go first.
    """

    no_token_error = (
        "no token was left to draw: what structured_outputs allows next is banned by bad_words, "
        "logit_bias, min_tokens or stop_token_ids, or the model's logits were not finite"
    )

    def __init__(self, compiling: Future[Any]) -> None:
        self.compiling = compiling
        self._matcher: Matcher | None = None
        self._mask = b""

    @property
    def is_compiled(self) -> bool:
        """Whether `start` can be called: the grammar is compiled, or can't be."""
        return self.compiling.done()

    def start(self) -> None:
        """Raises InvalidRequestError for a wrong grammar, and anything that a matcher raises."""
        self._matcher = self.compiling.result()
        self._mask = self._matcher.mask()

    def is_ready(self, request: Request) -> bool:
        return self._matcher is not None and request.num_tokens == len(request.token_ids)

    def on_draw(self, request: Request, work: RowWork, masks: list[RowMask]) -> None:
        masks.append(RowMask(row=work.row, words=self._mask))

    def on_token(
        self, request: Request, token: int, logprob: TokenLogprobs | None
    ) -> RequestUpdate:
        assert self._matcher is not None
        try:
            self._matcher.accept(token)
            is_complete = self._matcher.is_complete
            if not is_complete:
                self._mask = self._matcher.mask()
        except Exception as error:  # of a third-party library: any of them ends one request
            problem = f"structured_outputs can't go on: {error or type(error).__name__}"
            return request.ended("error", problem)
        update = request.append(token, logprob)
        if is_complete and update.finish_reason != "stop":
            update.finish_reason, update.is_whole = "stop", True
        return update

    def on_finish(self, request: Request, error: str | None) -> None:
        self.compiling.cancel()


def wait_for_any(constraints: Iterable[Constraint]) -> None:
    """Wait a moment for one of them to be compiled, or not."""
    futures = [constraint.compiling for constraint in constraints]
    wait(futures, IDLE_WAIT_S, return_when=FIRST_COMPLETED)
