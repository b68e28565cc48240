"""Scheduler: plans steps, takes in their results, and owns every request until it ends.

    add() -> waiting -> schedule() -> running -> update() -> finished
                 ^----- preempt (blocks ran out, or a step failed)

Requests are served by rank: first come, first served, or by priority. When blocks run out, the
running request of the last rank goes back to `waiting`. A step takes one token of each running
decode, then what is left of running prompts, then new prompts, until its token budget is spent.

`schedule()` may be called again before `update()` of the step before: counts advance when a step
is planned, and tokens in flight are known by number only. Results come in the order of the plans.
A row and its blocks are given back only when no step in flight uses them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import islice, repeat

from llmc.engine import parallel_sampling as forks
from llmc.engine.beam_search import Beam
from llmc.engine.fault_bisection import FaultBisection
from llmc.engine.kv.block_pool import BlockPool
from llmc.engine.kv.layout import WHOLE, CacheLayout
from llmc.engine.kv.prefix_cache import live
from llmc.engine.kv.row_table import RowTable, new_row
from llmc.engine.messages import RequestUpdate
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.outcome import aborted, failed, not_drawn, take_token
from llmc.engine.plan import RowWork, StepPlan, StepResult, TokenLogprobs
from llmc.engine.plan_builder import PlanBuilder
from llmc.engine.queues import Queues
from llmc.engine.request import Request, RequestState
from llmc.engine.spec_decode.speculation import count_accepted

Drawn = tuple[int | None, TokenLogprobs | None]
RUNNING = RequestState.RUNNING
FINISHED = RequestState.FINISHED


class Scheduler:
    """Continuous batching over `max_num_seqs` rows and one BlockPool.

    With the policy "priority" a request of lower `priority` goes before all of higher ones, and
    takes the place of running ones if need be. Where layers see a window only, nothing is swapped.
    """

    def __init__(self, limits: EngineLimits, features: EngineFeatures) -> None:
        self.pool = BlockPool(limits.num_blocks, limits.block_size, features.enable_prefix_caching)
        self.layout = CacheLayout(
            block_size=limits.block_size,
            step_tokens=limits.max_num_batched_tokens,
            windows=tuple(features.windows),
        )
        room = features.swap_room if self.layout.windows == (WHOLE,) else None
        self.rows = RowTable(limits.max_num_seqs, self.pool, self.layout, room)
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.use_priority = features.scheduling_policy == "priority"
        self.requests: dict[str, Request] = {}  # all that are not finished
        self._queues = Queues(self.rows)
        self.running, self.waiting = self._queues.running, self._queues.waiting
        self.fault_bisection = FaultBisection()
        self.speculation = features.speculation
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished = 0
        self.num_failed_steps = 0
        self.num_wasted_row_steps = 0  # computed for a request that had ended by then
        self._num_arrivals = 0
        self._turned_away: Request | None = None  # the next in line, for want of room
        self._in_flight: deque[PlanBuilder] = deque()

    # Requests come and go

    def add(self, request: Request, sibling: Request | None = None) -> None:
        """Queue a request; with a `sibling` of the same prompt it shares the prompt's blocks."""
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id!r} is already here")
        if self.layout.blocks_for(request.max_total_tokens) > self.pool.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} can grow to {request.max_total_tokens} tokens; "
                f"the pool holds {self.pool.num_blocks} blocks of {self.pool.block_size}"
            )
        request.arrival = self._num_arrivals
        request.rank = (request.priority if self.use_priority else 0, request.arrival)
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        if self.speculation is not None and request.beam is None:
            self.speculation.enter(request)
        self.waiting.enter(request)
        if sibling is not None:
            forks.join(request, sibling)

    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request now; None if there is no such request, or it has just finished."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._finish(request)
        return aborted(request)

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._in_flight)

    @property
    def num_preemptions(self) -> int:
        return self._queues.num_preemptions

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and whose result has not come."""
        return len(self._in_flight)

    # Plan a step

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run (before a result in flight has come)."""
        draft = PlanBuilder(self.max_num_batched_tokens)
        if self.fault_bisection:
            self._plan_suspects(draft)
        else:
            if self.speculation is not None:
                self.speculation.begin(self.running, is_idle=not self._in_flight)
            self._plan_all(draft)
            while not draft.work and self._break_circle():
                self._plan_all(draft)
        if not draft.work:
            return None
        draft.saved, swap_out, swap_in = self.rows.swap.pop()
        draft.plan = StepPlan(
            step=self.num_steps,
            work=draft.work,
            new_rows=draft.new_rows,
            released_rows=self.rows.pop_released(),
            block_copies=self.rows.pop_copies(),
            swap_out=swap_out,
            swap_in=swap_in,
            row_masks=draft.row_masks,
        )
        self.num_steps += 1
        self._in_flight.append(draft)
        return draft.plan

    def _plan_all(self, draft: PlanBuilder) -> None:
        turned_away, self._turned_away = self._turned_away, None
        if turned_away is not None and self.waiting[:1] == [turned_away]:
            self._queues.make_way(turned_away)
        prefills = self._plan_decodes(draft)
        self._plan_prefills(draft, prefills)
        self._plan_waiting(draft)

    def _break_circle(self) -> bool:
        """Beams in rows wait for beams that wait for their rows or blocks: the last gives way.

        What it told stands, so that those who have not told yet get their turn.
        """
        if self._in_flight or not (self.running and self.waiting):
            return False
        self._queues.preempt(self.running[-1])
        return True

    def _plan_decodes(self, draft: PlanBuilder) -> list[Request]:
        """One token of each running request that has one left; the others are returned.

        A request that needs a block may preempt those after it, and itself: never one before it,
        so that whatever this step already holds stays.
        """
        prefills: list[Request] = []
        running = self.running
        index = 0
        while index < len(running) and draft.budget:
            request = running[index]
            index += 1
            num_tokens = request.num_tokens
            if num_tokens - request.num_computed != 1:
                prefills.append(request)
            elif num_tokens >= request.max_total_tokens:
                pass  # its last token is in flight
            elif (request.needs_known_token and request.awaits_token) or (
                request.drafter is not None
                and self._plan_guessed(request, draft, len(running) - index)
            ):
                pass  # it waits for a token in flight, or its next one is planned with guesses
            elif num_tokens <= request.capacity:
                draft.put_next(request)
            elif self._queues.make_room(request):
                draft.put_next(request, self.rows.grow(request))
        return prefills

    def _plan_guessed(self, request: Request, draft: PlanBuilder, num_after: int) -> bool:
        """Plan a decode with guesses, or let it wait for a token that they would follow.

        False: neither. Guesses take neither the budget nor the blocks of the `num_after` others.
        """
        if request.num_guessed:
            return True  # nobody knows yet how far it is
        speculation = self.speculation
        if speculation is None or request.needs_scores:
            return False
        num_rows = len(self.running)
        if request.num_in_flight:
            return speculation.is_hopeful(request, num_rows)
        num_tokens, block_size = request.num_tokens, self.pool.block_size
        num_spare = max(self.pool.num_free // self.layout.num_groups - num_after, 0)
        most = min(
            request.max_total_tokens - num_tokens - 1,
            draft.budget - num_after - 1,
            request.capacity + num_spare * block_size - num_tokens,
        )
        guesses = speculation.guess(request, most, num_rows) if most > 0 else ()
        if not guesses:
            return False
        blocks: list[int] = []
        while request.capacity < num_tokens + len(guesses):
            blocks += self.rows.grow(request)
        draft.put_guessed(request, guesses, blocks)
        return True

    def _plan_prefills(self, draft: PlanBuilder, prefills: list[Request]) -> None:
        """What is left of the prompts of running requests."""
        for request in prefills:
            if draft.has_room(request) and request.state is RUNNING:  # not preempted by a decode
                self._put_more(draft, request, request.num_tokens - request.num_computed)

    def _put_more(self, draft: PlanBuilder, request: Request, num_wanted: int) -> None:
        """Compute more of a running request, as far as its blocks reach. It has them all, unless
        layers that see a window only take theirs as they go.
        """
        num_wanted = min(num_wanted, draft.budget)
        blocks: list[int] = []
        while request.capacity < request.num_computed + num_wanted:
            if not self._queues.make_room(request):
                num_wanted = request.capacity - request.num_computed
                break
            blocks += self.rows.grow(request)
        if request.state is RUNNING and num_wanted > 0:
            draft.put(request, num_wanted, blocks)

    def _plan_waiting(self, draft: PlanBuilder) -> None:
        """Let in who comes next. Only those that wait for their prompt's blocks are passed by,
        and a row is kept for each of them; and beams that have nothing to do.
        """
        num_passed = num_told = 0
        while num_passed + num_told < len(self.waiting) and draft.budget:
            request = self.waiting[num_passed + num_told]
            if request.beam is not None and request.beam.told is not None:
                num_told += 1
                continue
            if self.rows.num_free_rows <= num_passed:
                self._turned_away = request
                return
            if not draft.has_room(request):
                return
            source = forks.find_source(request, draft)
            if source.wait:
                num_passed += 1
                continue
            # A preempted request comes back when the tokens it had in flight are known.
            # One block stays free for each running request: whoever is let in should not have to
            # be preempted by the others' very next growth.
            num_spare = len(self.running)
            if request.num_in_flight:
                return
            if not self.rows.allocate(request, num_spare, source):
                self._turned_away = request
                return
            num_wanted = request.num_tokens - request.num_computed
            self._enter(draft, request, num_wanted, source.request)

    def _plan_suspects(self, draft: PlanBuilder) -> None:
        """One step at a time, of suspects only. They may take the blocks of all others."""
        if self._in_flight:
            return
        group = self.fault_bisection.group  # who finds no room waits until others of it are cleared
        protected = {suspect.request.request_id for suspect in group}
        for suspect in group:
            request = suspect.request
            if not draft.has_room(request):
                return
            if request.state is RUNNING:
                self._put_more(draft, request, suspect.num_wanted)
            elif self._queues.allocate_by_preemption(request, protected):
                self._enter(draft, request, suspect.num_wanted)

    def _enter(
        self, draft: PlanBuilder, request: Request, num_wanted: int, source: Request | None = None
    ) -> None:
        """A request that was just given a row takes part in its first step."""
        self._queues.enter(request)
        if request.queue_s is None:
            self._count_first(request, source)
        draft.new_rows.append(new_row(request))
        num_wanted = min(num_wanted, request.capacity - request.num_computed)
        # nothing reads the entries of blocks that a window has left, so that any number does there
        draft.put(request, num_wanted, [max(block, 0) for block in request.blocks])

    def _count_first(self, request: Request, source: Request | None) -> None:
        request.queue_s = time.monotonic() - request.arrived_s
        self.num_prompt_tokens += request.num_prompt_tokens
        if source is not None:  # what it shares was computed for this very call
            request.num_cached_tokens = source.num_cached_tokens
        else:
            request.num_cached_tokens = request.num_computed
            self.pool.count_lookup(request.num_prompt_tokens, request.num_computed)

    # Take in a result

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply the result of the oldest plan in flight."""
        draft = self._oldest(plan)
        tokens, logprobs = result.token_ids, result.logprobs or repeat(None, draft.num_samples)
        expected = draft.num_samples, draft.num_scored
        if (len(tokens), len(result.scores)) != expected or (
            len(result.logprobs) not in (0, len(tokens))
        ):
            raise ValueError(
                f"step {plan.step} draws {draft.num_samples} tokens and scores "
                f"{draft.num_scored}, but its result has {len(tokens)} tokens, "
                f"{len(result.logprobs)} logprobs and {len(result.scores)} scores"
            )
        self._in_flight.popleft()
        block_size = self.pool.block_size
        updates: list[RequestUpdate] = []
        fault_bisection = self.fault_bisection if self.fault_bisection else None
        drawn, scores = zip(tokens, logprobs, strict=True), iter(result.scores)
        for request, work in zip(draft.requests, draft.work, strict=True):
            request.num_in_flight -= 1
            if work.draft_token_ids:
                updates += self._take_guessed(request, work, list(islice(drawn, work.num_samples)))
                if request.state is not RUNNING:
                    self._queues.settle(request)
                continue
            token, logprob = next(drawn) if work.sample else _NOTHING_DRAWN
            if work.is_scored:
                end = work.start + work.num_scored
                request.scores[work.start : end] = islice(scores, work.num_scored)
            if request.state is FINISHED:
                self.num_wasted_row_steps += 1
            elif work.sample and token is None:
                updates.append(self._fail_request(request, not_drawn(request)))
            else:
                num_computed = work.start + work.num_tokens
                if num_computed // block_size > request.num_published:
                    self._filled(request, num_computed)
                if fault_bisection:
                    fault_bisection.pass_by(request, num_computed)
                if token is not None and request.beam is not None:
                    self._take_candidates(request.beam, logprob)
                elif token is not None:
                    update = take_token(request, token, logprob)
                    self.num_generated_tokens += len(update.new_token_ids)
                    updates.append(update)
                    if update.finish_reason is not None:
                        self._finish(request)
            if request.state is not RUNNING and not request.num_in_flight:
                self._queues.settle(request)
        if self.speculation is not None:
            self.speculation.saw_step(draft.work, is_last=not self.requests)
        return updates

    def _filled(self, request: Request, num_computed: int) -> None:
        """Another block is computed to its end."""
        self.rows.publish(request, num_computed)
        if not self.layout.is_whole:
            self.rows.drop_unseen(request, num_computed)

    def _take_candidates(self, beam: Beam, logprob: TokenLogprobs | None) -> None:
        """A beam tells what may follow it; the last of them to do so lets all go on."""
        search = beam.search
        beam.told = logprob
        self.num_generated_tokens += 1
        if search.all_told:
            for request in search.advance():
                self._queues.turn_back(request)
            if search.is_over:
                self._finish(search.members[0])

    def _take_guessed(
        self, request: Request, work: RowWork, drawn: Sequence[Drawn]
    ) -> list[RequestUpdate]:
        """What was drawn after a token and its guesses: all that a plain decode would draw too.

        An update for each token, as if each had come in a step of its own.
        """
        request.num_guessed = 0
        if request.state is FINISHED:
            self.num_wasted_row_steps += 1
            return []
        updates: list[RequestUpdate] = []
        guesses = work.draft_token_ids
        num_accepted = count_accepted(guesses, [token for token, _ in drawn])
        for token, logprob in drawn[: num_accepted + 1]:
            if token is None:
                return [*updates, self._fail_request(request, not_drawn(request))]
            updates.append(take_token(request, token, logprob))
            self.num_generated_tokens += 1
            if updates[-1].finish_reason is not None:
                break
        request.num_computed += len(updates) - 1
        request.num_tokens += len(updates) - 1
        if request.num_computed // self.pool.block_size > request.num_published:
            self._filled(request, request.num_computed)
        if self.speculation is not None:
            self.speculation.saw(request, len(guesses), num_accepted)
        if updates[-1].finish_reason is not None:
            self._finish(request)
        return updates

    def fail(self, plan: StepPlan, error: str) -> list[RequestUpdate]:
        """The oldest plan in flight could not be run, and those after it mean nothing.

        Everybody who took part in them starts over, those of the failed plan in fault_bisection.
        """
        draft = self._oldest(plan)
        self.num_failed_steps += 1
        drafts = list(self._in_flight)
        self._in_flight.clear()
        culprit = self.fault_bisection.accuse(list(zip(draft.requests, draft.work, strict=True)))
        updates = [] if culprit is None else [self._fail_request(culprit, error)]
        for void in drafts:
            assert void.plan is not None
            for request in void.requests:
                self._queues.start_over(request)
            for request in void.saved:  # nobody knows whether the copies were made
                self.rows.swap.drop(request)
            # The runner may not have heard of the rows that were released; say it again.
            self.rows.release_again(void.plan.released_rows)
        return updates

    def _oldest(self, plan: StepPlan) -> PlanBuilder:
        if not self._in_flight or self._in_flight[0].plan is not plan:
            raise ValueError(f"step {plan.step} is not the oldest step in flight")
        return self._in_flight[0]

    def _fail_request(self, request: Request, error: str) -> RequestUpdate:
        self.pool.forget(live(request.blocks))  # nobody else should read what led to this
        if request.beam is not None:
            request.beam.search.error = error
        self._finish(request)
        return failed(request, error)

    def _finish(self, request: Request) -> None:
        """End a request; the beams of a search end together."""
        if request.beam is None:
            self._end(request)
            return
        request.beam.search.is_over = True
        for member in request.beam.search.members:
            self._end(member)

    def _end(self, request: Request) -> None:
        del self.requests[request.request_id]
        self.num_finished += 1
        forks.leave(request)
        if self.speculation is not None:
            self.speculation.leave(request)
        if self.fault_bisection:
            self.fault_bisection.drop(request)
        self._queues.finish(request)

    # Invariants

    def check(self) -> None:
        """Raise AssertionError unless rows, blocks and queues agree. Costs O(num_blocks)."""
        broken = self._queues.broken_rules()
        queued = [*self.running, *self.waiting]
        rules = {
            "every request is in one queue": len(queued) == len(self.requests)
            and all(self.requests.get(r.request_id) is r for r in queued),
            "an idle scheduler holds nothing": self.has_work or not any(self.rows.owners),
            "suspects are alive": all(
                self.requests.get(request.request_id) is request
                for request in self.fault_bisection.members
            ),
        }
        broken += [rule for rule, holds in rules.items() if not holds]
        if self.speculation is not None:
            self.speculation.check(self.requests)
        if broken:
            raise AssertionError("scheduler: not true that " + "; nor that ".join(broken))


_NOTHING_DRAWN: tuple[None, None] = (None, None)
