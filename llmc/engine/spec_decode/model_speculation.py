"""ModelSpeculation: guesses of a draft model, for all requests at once, while that pays.

    begin() before each step:  how many, if any --> read what is new --> guess --> the plan

A step of the draft model takes as long for one request as for many, so whether to guess is decided
for all together, by how often its guesses were right and by measured times: of a plain step, of a
draft step, and of a token more in a step. To read a long text so as to guess a few tokens does not
pay either. Where nothing pays, it is tried now and then, so rarely that nobody notices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from llmc.engine.plan import RowWork
from llmc.engine.request import Request
from llmc.engine.spec_decode.draft_model import DraftModel
from llmc.engine.spec_decode.draft_pace import (
    Acceptance,
    StepTimes,
    best_gain,
    best_length,
    num_tested,
)
from llmc.engine.spec_decode.draft_sequence import Follower
from llmc.engine.spec_decode.read_pace import ReadPace
from llmc.engine.spec_decode.speculation import FIRST_CHANCE, Clock, Drafter, Guesser, Speculation
from llmc.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

_MOST_FAILURES = 3  # of the draft model; after that it is left alone


class ModelSpeculation(Speculation):
    """`step_cost` is what a draft step may take, as a share of a plain one, before any was seen."""

    def __init__(
        self,
        config: SpeculativeConfig,
        model: DraftModel,
        clock: Clock = time.perf_counter,
        step_cost: float = 0.1,
    ) -> None:
        super().__init__(config, clock)
        self._model = model
        self._clock = clock
        self._step_cost = step_cost
        self._times = StepTimes()  # of draft steps
        self._reading = ReadPace(clock)
        self._pair = Acceptance(FIRST_CHANCE, weight=10.0, memory=0.9)  # of all, by step
        self._tested = self._right = 0  # in the step whose result is being taken in
        self._num_steps = 0
        self._num_failures = 0
        self._lengths: dict[str, int] = {}  # how much to guess in this step

    def _guesser(self, request: Request) -> Guesser:
        return self._model.follow(request)

    def leave(self, request: Request) -> None:
        if request.drafter is not None:
            self._model.leave(_follower(request.drafter))
            self._reading.saw_answer(request.num_output_tokens)

    def _length(self, drafter: Drafter, request: Request, num_rows: int) -> int:
        return self._lengths.get(request.request_id, 0)

    def begin(self, running: Collection[Request], *, is_idle: bool) -> None:
        self._lengths = {}
        num_rows = len(running)
        cost, plain = self._costs.cost(num_rows), self._costs.plain.usual(num_rows)
        if cost is None or plain is None or self._num_failures == _MOST_FAILURES:
            return
        if not self._pays.allows_guesses:
            return
        times = self._times.usual(num_rows)
        step_cost = self._step_cost if times is None else times / max(plain, 1e-9)
        most, chance = self._config.num_speculative_tokens, self._pair.chance
        length = self._pair.length(cost + step_cost, most, self._num_steps)
        if not length:
            return
        wanted = self._wanted(running, cost, length)
        behind = [follower for follower, _ in wanted if not follower.is_ready()]
        if behind:
            seconds = step_cost * plain
            saving = None if times is None else plain / num_rows
            behind = self._worth_reading(behind, cost + step_cost, saving, seconds)
            wanted = [one for one in wanted if one[0].is_ready() or one[0] in behind]
        if not wanted:
            return
        is_trial = not best_length(chance, cost + step_cost, most)
        if is_trial or best_length(chance, cost + step_cost * num_rows / len(wanted), length):
            self._lengths = {one.request.request_id: length for one, length in wanted}
            self._draft(wanted, behind, num_rows, is_idle)

    def _wanted(
        self, running: Collection[Request], cost: float, length: int
    ) -> list[tuple[Follower, int]]:
        """Who decodes and can be guessed well enough for a longer step to pay, and how far."""
        wanted = []
        for request in running:
            drafter, num_tokens = request.drafter, len(request.token_ids)
            is_decode = request.num_tokens - request.num_computed == 1 and not request.num_guessed
            if drafter is None or not is_decode or request.needs_scores:
                continue
            follower = _follower(drafter)
            num_left = request.max_total_tokens - request.num_tokens - 1
            most = min(length, num_left, self._model.most(follower))
            if most > 0 and (count := drafter.acceptance.length(cost, most, num_tokens)):
                wanted.append((follower, count))
        return wanted

    def _worth_reading(
        self, behind: Sequence[Follower], cost: float, plain: float | None, step: float
    ) -> list[Follower]:
        """Whose text to read: where the time is likely to come back, else one at times.

        `plain` is a request's share of a plain step, None while it is not known what a draft step
        takes, and `step` the latter, in seconds.
        """
        most, worth = self._config.num_speculative_tokens, []
        for follower in behind:
            if plain is None:
                break
            request = follower.request
            assert request.drafter is not None
            _, gain = best_gain(request.drafter.acceptance.chance, cost, most)
            num_left = request.max_total_tokens - request.num_tokens
            saved = plain * (1.0 - 1.0 / gain)
            if self._reading.pays(follower.num_behind, num_left, saved, step):
                worth.append(follower)
        shortest = min(behind, key=lambda follower: follower.num_behind)
        if not worth and self._reading.may_try(shortest.num_behind, step):
            worth.append(shortest)
        return worth

    def _draft(
        self,
        wanted: Sequence[tuple[Follower, int]],
        behind: Sequence[Follower],
        num_rows: int,
        is_idle: bool,
    ) -> None:
        """Read and guess. Both take time, which is not the next step's."""
        began = self._clock()
        try:
            if behind:
                num_read = self._model.read(behind)
                self._reading.took(num_read, self._clock() - began)
            start = self._clock()
            num_steps = self._model.guess(
                [one for one in wanted if one[0].is_ready() and not one[0].request.num_in_flight]
            )
        except Exception:  # whatever it is, it costs guesses and no request
            self._num_failures += 1
            what = "it is left alone" if self._num_failures == _MOST_FAILURES else "it starts over"
            logger.exception("the draft model failed; %s", what)
            self._lengths = {}
            self._model.start_over()
            self._costs.rest()
            return
        end = self._clock()
        if not is_idle:  # times of steps that run at once say nothing
            self._costs.rest()
            return
        self._costs.exclude(end - began)
        if num_steps:
            self._times.add(num_rows, (end - start) / num_steps)

    def saw(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        super().saw(request, num_drafted, num_accepted)
        self._tested += num_tested(num_drafted, num_accepted)
        self._right += num_accepted

    def saw_step(self, work: Sequence[RowWork], is_last: bool) -> None:
        super().saw_step(work, is_last)
        self._num_steps += 1
        if self._tested:
            self._pair.saw(self._tested, self._right)
            self._tested = self._right = 0

    def check(self, requests: Collection[str]) -> None:
        self._model.check(requests)


def _follower(drafter: Drafter) -> Follower:
    assert isinstance(drafter.guesser, Follower)
    return drafter.guesser
