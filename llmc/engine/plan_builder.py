"""PlanBuilder: a step while the scheduler puts it together, kept until its result comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmc.engine.plan import NewRow, RowMask, RowWork, StepPlan
from llmc.engine.request import Request

MAX_SCORED = 256  # tokens of a step whose next one is scored: each takes a row of logits


@dataclass(slots=True)
class PlanBuilder:
    """`requests` is aligned with `work`; `budget` is how many tokens still fit."""

    budget: int
    work: list[RowWork] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    row_masks: list[RowMask] = field(default_factory=list)  # of rows that draw under a grammar
    saved: list[Request] = field(default_factory=list)  # swapped out by this step
    num_samples: int = 0
    num_scored: int = 0
    plan: StepPlan | None = None

    def num_planned(self, request: Request) -> int:
        """Tokens of the request in this step, without guesses."""
        for one, work in zip(self.requests, self.work, strict=True):
            if one is request:
                return work.num_tokens - len(work.draft_token_ids)
        return 0

    def enters(self, request: Request) -> bool:
        """Whether the request gets its row in this step."""
        return any(new.row == request.row for new in self.new_rows)

    def has_room(self, request: Request) -> bool:
        """Whether the request can compute a token in this step."""
        return self.budget > 0 and not (request.needs_scores and self.num_scored >= MAX_SCORED)

    def put(self, request: Request, num_wanted: int, new_blocks: Sequence[int] = ()) -> None:
        """Compute the request's next `num_wanted` tokens, or as many as the budget allows.

        A token is drawn when that brings it to its newest one.
        """
        assert request.row is not None
        start = request.num_computed
        num_tokens = min(num_wanted, self.budget)
        is_scored = request.needs_scores and start < len(request.scores)
        if is_scored:
            num_tokens = min(num_tokens, MAX_SCORED - self.num_scored)
        end = request.num_computed = start + num_tokens
        sample = end == request.num_tokens
        if sample:
            request.num_tokens = end + 1
            self.num_samples += 1
            if request.matcher is not None:
                self._mask(request)
        request.num_in_flight += 1
        self.budget -= num_tokens
        self.requests.append(request)
        self.work.append(
            RowWork(
                row=request.row,
                start=start,
                num_tokens=num_tokens,
                sample=sample,
                new_blocks=new_blocks,
                is_scored=is_scored,
            )
        )
        self.num_scored += self.work[-1].num_scored

    def _mask(self, request: Request) -> None:
        assert request.row is not None and request.mask is not None
        self.row_masks.append(RowMask(row=request.row, words=request.mask))

    def _lead(self, request: Request) -> Sequence[int]:
        """What the engine says of a draw: its mask, or that another token was chosen."""
        if request.matcher is not None:
            self._mask(request)
        return request.token_ids[-1:] if request.beam is not None else ()

    def put_next(self, request: Request, new_blocks: Sequence[int] = ()) -> None:
        """`put` for the one token of a decode, which is most of what a step does."""
        assert request.row is not None
        start = request.num_computed
        request.num_computed = start + 1
        request.num_tokens = start + 2
        request.num_in_flight += 1
        self.budget -= 1
        self.num_samples += 1
        self.requests.append(request)
        work = RowWork(
            row=request.row, start=start, num_tokens=1, sample=True, new_blocks=new_blocks
        )
        if request.needs_known_token:
            work.entered_token_ids = self._lead(request)
        self.work.append(work)

    def put_guessed(
        self, request: Request, guesses: Sequence[int], new_blocks: Sequence[int]
    ) -> None:
        """`put_next` with guesses behind the token; the counts are those of a step without."""
        assert request.row is not None and request.num_in_flight == 0
        num_tokens = 1 + len(guesses)
        start = request.num_computed
        request.num_computed = start + 1
        request.num_tokens = start + 2
        request.num_in_flight = 1
        request.num_guessed = len(guesses)
        self.budget -= num_tokens
        self.num_samples += num_tokens
        self.requests.append(request)
        self.work.append(
            RowWork(
                row=request.row,
                start=start,
                num_tokens=num_tokens,
                sample=True,
                new_blocks=new_blocks,
                draft_token_ids=guesses,
            )
        )
