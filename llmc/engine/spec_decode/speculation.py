"""Speculation: guesses that ride along in a row's next step, so that one step may draw several.

    tokens known   ... a b c        guesses  d e f
    step computes          c d e f           (a plain one: c alone)
    step draws               d e x y         d and e were right; x is drawn where f was guessed
    taken                    d e x           y came after a wrong f and means nothing

What is drawn at a position depends on the tokens before it, the request's seed and the position,
so the tokens taken are those that plain steps would draw, at any temperature and under all
processors: guesses decide how many steps an answer takes, never what it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from llmc.engine.plan import RowWork
from llmc.engine.request import Request
from llmc.engine.spec_decode.draft_pace import Acceptance, DraftCosts, num_tested
from llmc.engine.spec_decode.ngram import PromptLookup
from llmc.engine.spec_decode.pay_check import PayCheck
from llmc.speculative_config import SpeculativeConfig

FIRST_CHANCE = 0.7  # before anything was guessed
Clock = Callable[[], float]


class Guesser(Protocol):
    """Says how one request may go on."""

    def is_ready(self) -> bool:
        """Whether it is likely to have a guess."""

    def guess(self, most: int) -> Sequence[int]:
        """Up to `most` tokens that may come next; nothing where it can't tell."""


class Drafter:
    """What is needed to guess for one request."""

    def __init__(self, guesser: Guesser, acceptance: Acceptance) -> None:
        self.guesser = guesser
        self.acceptance = acceptance


class Speculation:
    """Guesses for all requests of one scheduler, and counts what became of them.

    This one looks the last tokens up in the request's own text.
    """

    def __init__(self, config: SpeculativeConfig, clock: Clock = time.perf_counter) -> None:
        self._config = config
        self._costs = DraftCosts(clock)
        self._pays = PayCheck()
        self._num_accepted = 0  # in the step whose result is being taken in
        self._overall = Acceptance(FIRST_CHANCE, weight=10.0, memory=0.98)
        self.num_drafts = 0  # steps of a request that held guesses
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def enter(self, request: Request) -> None:
        """A request comes. It gets a drafter if guessing is possible for it."""
        if request.sampling.structured_outputs is None:  # masks follow from known tokens
            guesser = self._guesser(request)
            request.drafter = Drafter(guesser, Acceptance(self._overall.chance))

    def _guesser(self, request: Request) -> Guesser:
        return PromptLookup(request.token_ids, *self._config.lengths)

    def leave(self, request: Request) -> None:
        """The request is over."""

    def begin(self, running: Collection[Request], *, is_idle: bool) -> None:
        """A step of these is about to be planned; `is_idle`: none is under way."""

    def is_hopeful(self, request: Request, num_rows: int) -> bool:
        """A token of the request is in flight: whether to wait for it, so as to guess after it."""
        drafter = request.drafter
        assert drafter is not None
        return self._length(drafter, request, num_rows) > 0 and drafter.guesser.is_ready()

    def guess(self, request: Request, most: int, num_rows: int) -> Sequence[int]:
        """Up to `most` tokens that may follow those of the request, all of which are known."""
        drafter = request.drafter
        assert drafter is not None
        length = min(most, self._length(drafter, request, num_rows))
        return drafter.guesser.guess(length) if length > 0 else ()

    def _length(self, drafter: Drafter, request: Request, num_rows: int) -> int:
        cost = self._costs.cost(num_rows)
        if cost is None or not self._pays.allows_guesses:
            return 0
        most = self._config.num_speculative_tokens
        return drafter.acceptance.length(cost, most, len(request.token_ids))

    def saw(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """What became of a request's guesses."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self._num_accepted += num_accepted
        tested = num_tested(num_drafted, num_accepted)
        self._overall.saw(tested, num_accepted)
        if request.drafter is not None:
            request.drafter.acceptance.saw(tested, num_accepted)

    def saw_step(self, work: Sequence[RowWork], is_last: bool) -> None:
        """The result of a step came; after the last one nothing runs for a while."""
        num_drafted = sum(len(one.draft_token_ids) for one in work)
        is_decode = all(one.num_tokens == one.num_samples for one in work)
        seconds = self._costs.saw_step(len(work), num_drafted, is_decode)
        if seconds is not None and num_drafted:
            self._pays.saw_guessed(len(work), seconds, self._num_accepted)
        elif seconds is not None:
            self._pays.saw_plain(len(work), seconds)
        self._num_accepted = 0
        if is_last:
            self._costs.rest()

    def check(self, requests: Collection[str]) -> None:
        """Raise AssertionError where something is kept for a request that is not one of these."""


def count_accepted(guesses: Sequence[int], drawn: Sequence[int | None]) -> int:
    """How many guesses were drawn just so, up to the first that was not."""
    for count, (guess, token) in enumerate(zip(guesses, drawn, strict=False)):
        if guess != token:
            return count
    return len(guesses)
