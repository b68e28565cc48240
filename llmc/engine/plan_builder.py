"""PlanBuilder: the step that the scheduler is putting together, kept until its result arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmc.engine.kv.snapshots import StateSnapshots
from llmc.engine.plan import NewRow, RowMask, RowWork, StepPlan
from llmc.engine.request import Request
from llmc.image_input import end_without_cut, start_of_cut_span


@dataclass(slots=True)
class PlanBuilder:
    """One step under construction.

    `requests` is aligned with `work`. `budget` is how many tokens still fit, and `score_budget` how
    many scored tokens a step can have. `snapshots` is set for models with recurrent state; states
    of answers are kept only with `keeps_answers`.
    """

    budget: int
    score_budget: int
    snapshots: StateSnapshots | None = None
    keeps_answers: bool = False
    work: list[RowWork] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    row_masks: list[RowMask] = field(default_factory=list)
    saved: list[Request] = field(default_factory=list)  # swapped out by this step
    num_samples: int = 0
    num_scored: int = 0
    plan: StepPlan | None = None

    def has_room(self, request: Request) -> bool:
        """Whether the request can compute a token in this step."""
        if request.needs_scores and self.num_scored >= self.score_budget:
            return False
        return self.budget >= request.min_step_tokens

    def num_computed_before(self, request: Request) -> int | None:
        """Tokens of a running request computed by earlier steps; None if this step admits it."""
        if any(new.row == request.row for new in self.new_rows):
            return None
        for one, work in zip(self.requests, self.work, strict=True):
            if one is request:
                return work.start
        return request.num_computed

    def add(self, request: Request, num_wanted: int, new_blocks: Sequence[int] = ()) -> None:
        """Compute the request's next `num_wanted` tokens, or as many as the budget allows.

        A token is drawn if that brings it to its newest one.
        """
        assert request.row is not None
        start = request.num_computed
        num_tokens = min(num_wanted, self.budget)
        is_scored = request.needs_scores and start < len(request.prompt_scores)
        if is_scored:
            num_tokens = min(num_tokens, self.score_budget - self.num_scored)
        if request.atomic_spans:
            num_tokens = end_without_cut(request.atomic_spans, start, start + num_tokens) - start
        stop = self._stop_at(request, start + num_tokens)
        if stop is not None:
            num_tokens = stop - start
        end = request.num_computed = start + num_tokens
        work = RowWork(
            row=request.row,
            start=start,
            num_tokens=num_tokens,
            sample=end == request.num_tokens,
            new_blocks=new_blocks,
            is_scored=is_scored,
        )
        if stop is not None and self.snapshots is not None:
            work.snapshot = self.snapshots.take()
            request.table.kept_at = stop
        if work.sample:
            request.num_tokens = end + 1
            self.num_samples += 1
            if request.extension is not None:
                request.extension.on_draw(request, work, self.row_masks)
        request.num_in_flight += 1
        self.budget -= num_tokens
        self.num_scored += work.num_scored
        self.requests.append(request)
        self.work.append(work)

    def _stop_at(self, request: Request, end: int) -> int | None:
        """Where to keep the request's state, at or before `end`; None: nowhere."""
        stop = None if self.snapshots is None else self.snapshots.stop_at(request, end)
        if (
            stop is not None
            and request.atomic_spans
            and start_of_cut_span(request.atomic_spans, stop) != stop
        ):
            return None
        return stop

    def add_decode(
        self,
        request: Request,
        new_blocks: Sequence[int] = (),
        draft_tokens: Sequence[int] = (),
    ) -> None:
        """`add` for one known token, the most common case.

        Until the result is known, the request's counts are those of a step without draft tokens.
        """
        assert request.row is not None
        start = request.num_computed
        request.num_computed = start + 1
        request.num_tokens = start + 2
        request.num_in_flight += 1
        work = RowWork(
            row=request.row, start=start, num_tokens=1, sample=True, new_blocks=new_blocks
        )
        if draft_tokens:
            work.draft_token_ids = draft_tokens
            work.num_tokens += len(draft_tokens)
        snapshots = self.snapshots
        if self.keeps_answers and snapshots and request.num_computed % snapshots.block_size == 0:
            work.snapshot = snapshots.take_for_answer(request)
        self.budget -= work.num_tokens
        self.num_samples += work.num_tokens
        if request.extension is not None:
            request.extension.on_draw(request, work, self.row_masks)
        self.requests.append(request)
        self.work.append(work)
