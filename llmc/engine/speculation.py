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
from collections.abc import Callable, Sequence

from llmc.engine.draft_pace import Acceptance, DraftCosts
from llmc.engine.plan import RowWork
from llmc.engine.prompt_lookup import PromptLookup
from llmc.engine.request import Request
from llmc.speculative_config import SpeculativeConfig

_FIRST_CHANCE = 0.7  # before anything was guessed
_MEMORY = 0.98


class Drafter:
    """What is needed to guess for one request."""

    def __init__(self, lookup: PromptLookup, acceptance: Acceptance) -> None:
        self.lookup = lookup
        self.acceptance = acceptance


class Speculation:
    """Guesses for all requests of one scheduler, and counts what became of them."""

    def __init__(
        self, config: SpeculativeConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._config = config
        self._costs = DraftCosts(clock)
        self._right, self._tested = 10 * _FIRST_CHANCE, 10.0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def enter(self, request: Request) -> None:
        """A request comes. It gets a drafter if guessing is possible for it."""
        if request.sampling.structured_outputs is None:  # masks follow from known tokens
            lookup = PromptLookup(request.token_ids, *self._config.lengths)
            request.drafter = Drafter(lookup, Acceptance(self._right / self._tested))

    def is_hopeful(self, request: Request, num_rows: int) -> bool:
        """A token of the request is in flight: whether to wait for it, so as to guess after it."""
        drafter = request.drafter
        assert drafter is not None
        return self._length(drafter, request, num_rows) > 0 and drafter.lookup.find() is not None

    def guess(self, request: Request, most: int, num_rows: int) -> Sequence[int]:
        """Up to `most` tokens that may follow those of the request, all of which are known."""
        drafter = request.drafter
        assert drafter is not None
        length = min(most, self._length(drafter, request, num_rows))
        return drafter.lookup.guess(length) if length > 0 else ()

    def _length(self, drafter: Drafter, request: Request, num_rows: int) -> int:
        cost = self._costs.cost(num_rows)
        if cost is None:
            return 0
        most = self._config.num_speculative_tokens
        return drafter.acceptance.length(cost, most, len(request.token_ids))

    def saw(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """What became of a request's guesses."""
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self._right = self._right * _MEMORY + num_accepted
        self._tested = self._tested * _MEMORY + min(num_accepted + 1, num_drafted)
        if request.drafter is not None:
            request.drafter.acceptance.saw(num_drafted, num_accepted)

    def saw_step(self, work: Sequence[RowWork], is_last: bool) -> None:
        """The result of a step came; after the last one nothing runs for a while."""
        num_drafted = sum(len(one.draft_token_ids) for one in work)
        is_decode = all(one.num_tokens == one.num_samples for one in work)
        self._costs.saw_step(len(work), num_drafted, is_decode)
        if is_last:
            self._costs.rest()


def count_accepted(guesses: Sequence[int], drawn: Sequence[int | None]) -> int:
    """How many guesses were drawn just so, up to the first that was not."""
    for count, (guess, token) in enumerate(zip(guesses, drawn, strict=False)):
        if guess != token:
            return count
    return len(guesses)
