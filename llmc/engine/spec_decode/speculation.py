"""Speculation: adds draft tokens to a request's next step, so that one step can draw several.

    tokens known   ... a b c        draft tokens  d e f
    step computes          c d e f                (a plain one: c alone)
    step draws               d e x y              d and e are accepted; x is drawn in place of f
    output                   d e x                y follows a wrong token and is dropped

The token drawn at a position depends on the tokens before it, the request's seed and the position.
The output is therefore the same as with plain steps, at any temperature and with all processors:
draft tokens affect the number of steps, never the output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from llmc.engine.plan import RowMask, RowWork
from llmc.engine.request import Extension, Request
from llmc.engine.spec_decode.policy import SpeculationPolicy
from llmc.speculative_config import SpeculativeConfig


class Speculation(ABC):
    """Proposes draft tokens for the requests of one scheduler, and counts how many are accepted."""

    def __init__(self, config: SpeculativeConfig, policy: SpeculationPolicy | None = None) -> None:
        self.config = config
        self.policy = policy or SpeculationPolicy()
        self.is_on = False  # in the step that is being planned
        self.num_drafts = 0  # times that a request had draft tokens in a step
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.draft_seconds = 0.0  # spent on drafting since the last result

    @abstractmethod
    def drafter(self, request: Request) -> Drafter:
        """Create the drafter of a new request."""

    def begin_step(self, running: Collection[Request]) -> None:
        """Called before a step with these requests is planned."""
        self.is_on = self.policy.is_on(len(running))

    def end_step(
        self,
        work: Sequence[RowWork],
        *,
        num_running: int,
        num_tokens: int,
        num_accepted: int,
        is_last: bool,
    ) -> None:
        """Record a step's result: how many tokens were output, and accepted draft tokens."""
        num_drafts = sum(bool(one.draft_token_ids) for one in work)
        self.num_drafts += num_drafts
        self.num_draft_tokens += sum(len(one.draft_token_ids) for one in work)
        self.num_accepted_tokens += num_accepted
        self.policy.on_step(
            len(work),
            num_running=num_running,
            num_tokens=num_tokens,
            is_decode=all(one.num_tokens == one.num_samples for one in work),
            is_plain=num_drafts == 0 and self.draft_seconds == 0,
            draft_seconds=self.draft_seconds,
        )
        self.draft_seconds = 0.0
        if is_last:
            self.policy.pause()

    def use_idle_time(self, *, has_work: bool) -> bool:
        """As `Runner.use_idle_time`, for the runner of a draft model."""
        return False

    def release_caches(self) -> int:
        """As `EngineCore.release_caches`, for the caches of a draft model."""
        return 0

    def check(self, request_ids: Collection[str]) -> None:  # noqa: B027 - nothing to check here
        """Raise AssertionError if anything is kept for a request that is not one of these."""


class Drafter(Extension, ABC):
    """Proposes the draft tokens of one request."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._has_drafted = False  # in the last step that drew a token

    def is_ready(self, request: Request) -> bool:
        """Not ready with a token in flight if draft tokens are in flight or should follow it."""
        if not request.num_in_flight:
            return True
        is_expected = self._speculation.is_on and self.expects_draft(request)
        return not (self.is_verifying(request) or is_expected)

    def is_verifying(self, request: Request) -> bool:
        return self._has_drafted and request.num_in_flight > 0

    def draft_tokens(self, request: Request) -> Sequence[int]:
        if request.num_in_flight or not self._speculation.is_on:
            return ()
        return self.propose(request, self._speculation.config.num_speculative_tokens)

    def on_draw(self, request: Request, work: RowWork, masks: list[RowMask]) -> None:
        self._has_drafted = bool(work.draft_token_ids)

    @abstractmethod
    def expects_draft(self, request: Request) -> bool:
        """Whether draft tokens are likely once the token in flight is known."""

    @abstractmethod
    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Propose up to `most` tokens to follow those of the request, all of which are known."""


def count_accepted(draft_tokens: Sequence[int], drawn: Sequence[int | None]) -> int:
    """How many draft tokens equal the drawn tokens, up to the first mismatch."""
    for count, (draft, token) in enumerate(zip(draft_tokens, drawn, strict=False)):
        if draft != token:
            return count
    return len(draft_tokens)
