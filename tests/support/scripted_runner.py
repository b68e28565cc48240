"""A runner without a model: a function returns the next token for each row's tokens.

It needs no torch and no tokenizer, so a process that uses it starts quickly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from pending import DoneStep, run_now

from llmc.engine.plan import EagerReason, NewRow, RowWork, StepPlan, StepResult, TokenLogprobs

NUM_TOKENS = 300  # made-up logprobs use token ids below this
# (a request, its tokens so far) -> the next one; None means NaN logits
NextToken = Callable[[NewRow, Sequence[int]], int | None]


class ScriptedRunner:
    """Runs each step when it is submitted; can slow down steps, or make one fail."""

    def __init__(self, next_token: NextToken, *, max_in_flight: int = 2) -> None:
        self.next_token = next_token
        self.max_in_flight = max_in_flight
        self.num_runtime_compiles = 0
        self.eager_steps: Mapping[EagerReason, int] = {}
        self.num_steps = 0
        self.is_profiling = False
        self.delay_s = 0.0
        self.fail_next: Exception | None = None
        self._rows: dict[int, tuple[NewRow, list[int]]] = {}

    def use_idle_time(self, *, has_work: bool = False) -> bool:
        return False

    def release_caches(self) -> int:
        return 0

    def start_profile(self) -> None:
        if self.is_profiling:
            raise RuntimeError("a profile is already being recorded; stop it first")
        self.is_profiling = True

    def stop_profile(self, folder: str) -> str:
        if not self.is_profiling:
            raise RuntimeError("no profile is being recorded; start one first")
        self.is_profiling = False
        return f"{folder}/profile"

    def submit(self, plan: StepPlan) -> DoneStep:
        return run_now(self.execute, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        for row in plan.released_rows:
            self._rows.pop(row, None)
        for new in plan.new_rows:
            self._rows[new.row] = (new, list(new.token_ids))
        scores = [score for work in plan.work for score in self._scores(work)]
        drawn = [self._draw(work) for work in plan.work if work.sample]
        return StepResult(
            token_ids=[token for token, _ in drawn],
            logprobs=[logprob for _, logprob in drawn],
            scores=scores,
        )

    def _scores(self, work: RowWork) -> list[TokenLogprobs]:
        new, tokens = self._rows[work.row]
        follows = tokens[work.start + 1 : work.start + 1 + work.num_scored]
        return [made_up_logprobs(token, new.sampling.prompt_logprobs) for token in follows]

    def _draw(self, work: RowWork) -> tuple[int | None, TokenLogprobs | None]:
        new, tokens = self._rows[work.row]
        if work.entered_token_ids:
            first = work.start + work.num_tokens - len(work.entered_token_ids)
            tokens[first:] = work.entered_token_ids
        token = self.next_token(new, tokens)
        if token is None:
            return None, None
        tokens.append(token)
        wanted = new.num_candidates or new.sampling.logprobs
        return token, None if wanted is None else made_up_logprobs(token, wanted)


def made_up_logprobs(token: int, wanted: int | None) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=token,
        logprob=-0.5,
        rank=1,
        top_token_ids=[(token + i) % NUM_TOKENS for i in range(wanted or 0)],
        top_logprobs=[-0.5 - i for i in range(wanted or 0)],
    )
