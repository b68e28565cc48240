"""Grammar: the engine's side of structured outputs. Masks before sampling, tokens after it.

    add --Grammars.begin--> compiled in another thread --Constraint.start--> scheduled
    StepPlan.row_masks <--Matcher.mask--   Matcher.accept <-- StepResult.token_ids

The grammar compiler is passed to the engine from outside. A matcher belongs to its request, not to
a row, so it survives preemption. It has seen exactly the tokens that the host knows, so a request
with a matcher is planned only when none of its sampled tokens is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from llmc.engine.messages import RequestUpdate
from llmc.engine.plan import RowMask, RowWork, TokenLogprobs
from llmc.engine.request import Extension, Request
from llmc.structured_outputs import StructuredOutputsParams

IDLE_WAIT_S = 0.05  # how long to wait for a grammar when there is nothing else to do


class Matcher(Protocol):
    """Matches one sequence against a grammar. Any exception that it raises ends the request."""

    def mask(self) -> bytes:
        """The allowed next tokens, in the format of RowMask.words."""

    def accept(self, token: int, /) -> None:
        """Advance by a sampled token."""

    @property
    def is_complete(self) -> bool:
        """Whether only an end token can follow."""


class Grammars(Protocol):
    """Compiles grammars into matchers. Thread-safe."""

    def begin(self, spec: StructuredOutputsParams, /) -> Future[Any]:
        """Start compiling. The future's result is a Matcher at the start of an output; it fails
        with InvalidRequestError if the grammar is invalid."""


class Constraint(Extension):
    """A request's matcher, once its grammar is compiled, and the mask for the next token.

    A request waits while its grammar is compiled; requests after it can overtake it.
    """

    no_token_error = (
        "no token was left to sample: all tokens that structured_outputs allows next are banned by "
        "bad_words, logit_bias, min_tokens or stop_token_ids, or the model's logits were not finite"
    )

    def __init__(self, compiling: Future[Any]) -> None:
        self.compiling = compiling
        self._matcher: Matcher | None = None
        self._mask = b""

    @property
    def is_compiled(self) -> bool:
        """Whether `start` can be called: compilation has succeeded or failed."""
        return self.compiling.done()

    def start(self) -> None:
        """Raises InvalidRequestError for an invalid grammar, and whatever the matcher raises."""
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
        except Exception as error:  # third-party code: any exception ends this request only
            problem = f"structured_outputs failed: {error or type(error).__name__}"
            failed = request.ended("error", problem)
            failed.is_refused = True  # a grammar that is too complex fails again if it is retried
            return failed
        update = request.append(token, logprob)
        if is_complete and update.finish_reason != "stop":
            update.finish_reason, update.is_whole = "stop", True
        return update

    def on_finish(self, request: Request, error: str | None) -> None:
        self.compiling.cancel()


def wait_for_any(constraints: Iterable[Constraint]) -> None:
    """Wait briefly for one of them to finish compiling."""
    futures = [constraint.compiling for constraint in constraints]
    wait(futures, IDLE_WAIT_S, return_when=FIRST_COMPLETED)
