"""Scheduler: plans steps, processes their results, and owns every request until it ends.

    add() -> waiting -> schedule() -> running -> update() -> finished
                 ^----- preempt (blocks ran out, or a step failed)

Requests are served by rank: first come, first served, or by priority. When blocks run out, the
running request of the worst rank goes back to `waiting`. A step is filled with one token of each
running decode, then the rest of running prompts, then new prompts, up to its token budget.

`schedule()` can be called again before `update()` for the previous step. Counts advance when a step
is planned; of tokens in flight only the number is known. Results arrive in the order of the plans.
A row and its blocks are freed only when no step in flight uses them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import islice, repeat

from llmc.engine.adapters import AdapterSlots, Readiness
from llmc.engine.fault_bisection import FaultBisection
from llmc.engine.kv.block_pool import BlockPool
from llmc.engine.kv.layout import CacheLayout
from llmc.engine.kv.row_table import NO_SOURCE, RowTable, Source, new_row
from llmc.engine.messages import STEP_SIZES, FinishedRequest, RequestUpdate
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.parallel_sampling import find_source, share_prompt, stop_sharing
from llmc.engine.plan import BlockCopy, Score, StepPlan, StepResult, TokenLogprobs
from llmc.engine.plan_builder import PlanBuilder
from llmc.engine.queues import Queues
from llmc.engine.request import Request, RequestState
from llmc.engine.spec_decode.speculation import count_accepted
from llmc.image_input import start_of_cut_span

Drawn = tuple[int | None, TokenLogprobs | None]
MAX_FINISHED = 64  # finished requests remembered for monitoring
RUNNING = RequestState.RUNNING
FINISHED = RequestState.FINISHED


class Scheduler:
    """Continuous batching over `max_num_seqs` rows and one BlockPool.

    With the policy "priority", requests with a lower `priority` value go first, and preempt running
    ones if necessary.
    """

    def __init__(self, limits: EngineLimits, features: EngineFeatures) -> None:
        self.pool = BlockPool(
            limits.num_blocks,
            limits.block_size,
            features.enable_prefix_caching,
            features.num_snapshots,
        )
        self.layout = CacheLayout(
            block_size=limits.block_size,
            step_tokens=limits.max_num_batched_tokens,
            windows=tuple(features.windows),
        )
        loader = features.adapters
        self.adapters = AdapterSlots(loader) if loader is not None else None
        self.rows = RowTable(
            limits.max_num_seqs,
            self.pool,
            self.layout,
            features.swap_config,
            self.adapters,
            features.long_context_from,
        )
        self.requests: dict[str, Request] = {}  # all unfinished ones
        self.speculation = features.speculation
        self.bisection = FaultBisection()
        self._queues = Queues(self.rows)
        self.running, self.waiting = self._queues.running, self._queues.waiting
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._max_num_scored_tokens = limits.max_num_scored_tokens
        self._use_priority = features.scheduling_policy == "priority"
        self._in_flight: deque[PlanBuilder] = deque()
        self._no_room_for: Request | None = None  # that stopped admission in the last step
        self._num_arrivals = 0
        self.last_finished: deque[FinishedRequest] = deque(maxlen=MAX_FINISHED)
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_step_tokens = 0
        self.step_sizes = [0] * (len(STEP_SIZES) + 1)
        self.num_deferred = 0  # waiting requests that the last step passed over
        self.num_generated_tokens = 0
        self.num_finished = 0
        self.num_failed_steps = 0
        self.num_wasted_row_steps = 0  # computed for requests that had already ended

    # Requests come and go

    def add(self, request: Request, sibling: Request | None = None) -> None:
        """Queue a request. With a `sibling` that has the same prompt, share the prompt's blocks."""
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id!r} already exists")
        if self.layout.blocks_for(request.max_total_tokens) > self.pool.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} can grow to {request.max_total_tokens} tokens; "
                f"the pool holds {self.pool.num_blocks} blocks of {self.pool.block_size}"
            )
        if self.speculation is not None and request.extension is None:
            request.extension = self.speculation.drafter(request)
        request.rank = (request.priority if self._use_priority else 0, self._num_arrivals)
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.waiting.insert_ranked(request)
        if sibling is not None:
            share_prompt(request, sibling)

    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request now. Returns None if there is no such request or it has just finished."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self.finish(request)
        return request.ended("abort")

    def fail_request(self, request_id: str, error: str) -> RequestUpdate:
        return self._fail(self.requests[request_id], error)

    def finish(self, request: Request, error: str | None = None) -> None:
        """End a request, along with others that its extension ends with it."""
        del self.requests[request.request_id]
        self.num_finished += 1
        self.last_finished.append(request.summary())
        if request.siblings is not None:
            stop_sharing(request)
        if self.bisection.groups:
            self.bisection.drop(request)
        self._queues.finish(request)
        if request.extension is not None:
            request.extension.on_finish(request, error)

    def requeue(self, request: Request) -> None:
        self._queues.requeue(request)

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._in_flight)

    @property
    def num_preemptions(self) -> int:
        return self._queues.num_preemptions

    @property
    def num_in_flight(self) -> int:
        """Planned steps whose result has not arrived."""
        return len(self._in_flight)

    # Plan a step

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if nothing can run (until a result in flight arrives)."""
        snapshots = self.pool.snapshots
        keeps_answers = snapshots is not None and snapshots.can_keep_answers(len(self.running))
        builder = PlanBuilder(
            self._max_num_batched_tokens, self._max_num_scored_tokens, snapshots, keeps_answers
        )
        if self.bisection.groups:
            self._schedule_suspects(builder)
        else:
            if self.speculation is not None:
                self.speculation.begin_step(self.running)
            self._schedule_all(builder)
            # Running beams may be waiting for beams without a row or blocks: preempt the last.
            while not builder.work and not self._in_flight and self.running and self.waiting:
                self._queues.preempt(self.running[-1])
                self._schedule_all(builder)
        if not builder.work:
            return None
        swap_out: Sequence[BlockCopy] = ()
        swap_in: Sequence[BlockCopy] = ()
        if self.rows.swap is not None:
            builder.saved, swap_out, swap_in = self.rows.swap.pop()
        builder.plan = StepPlan(
            step=self.num_steps,
            work=builder.work,
            new_rows=builder.new_rows,
            released_rows=self.rows.pop_released(),
            block_copies=self.rows.pop_copies(),
            swap_out=swap_out,
            swap_in=swap_in,
            row_masks=builder.row_masks,
            adapter_copies=self.adapters.pop_copies() if self.adapters is not None else (),
        )
        self.num_steps += 1
        num_tokens = self._max_num_batched_tokens - builder.budget
        self.num_step_tokens += num_tokens
        self.step_sizes[bisect_left(STEP_SIZES, num_tokens)] += 1
        self._in_flight.append(builder)
        return builder.plan

    def _schedule_all(self, builder: PlanBuilder) -> None:
        first, self._no_room_for = self._no_room_for, None
        if first is not None and self.waiting[:1] == [first]:
            self._queues.preempt_for(first)
        prefills = self._schedule_decodes(builder)
        for request in prefills:
            if builder.has_room(request) and request.state is RUNNING:  # not preempted by a decode
                self._add_work(builder, request, request.num_tokens - request.num_computed)
        self._schedule_waiting(builder)

    def _schedule_decodes(self, builder: PlanBuilder) -> list[Request]:
        """Add one token of each running decode. Returns the running prefills.

        A request that needs a block may preempt those after it, or itself, but never one before it,
        so that work already in this step stays valid.
        """
        prefills: list[Request] = []
        running = self.running
        if self.rows.long_context_from is not None:
            for request in [r for r in running if self._needs_recompute(r)]:
                self._queues.requeue(request)
        index = 0
        while index < len(running) and builder.budget:
            request = running[index]
            index += 1
            num_tokens = request.num_tokens
            extension = request.extension
            if num_tokens - request.num_computed != 1:
                prefills.append(request)
            elif num_tokens >= request.max_total_tokens and num_tokens > request.num_prompt_tokens:
                pass  # its last token is in flight
            elif extension is not None and not extension.is_ready(request):
                pass
            elif extension is not None and (drafts := extension.draft_tokens(request)):
                self._add_drafts(builder, request, drafts, len(running) - index)
            elif num_tokens <= request.table.capacity:
                builder.add_decode(request)
            elif self._queues.make_room(request):
                builder.add_decode(request, self.rows.grow(request))
        return prefills

    def _needs_recompute(self, request: Request) -> bool:
        """Whether it has become a long sequence and has more tokens to draw."""
        has_grown = self.rows.position_offset(request) != request.position_offset
        return has_grown and request.num_tokens < request.max_total_tokens

    def _add_drafts(
        self, builder: PlanBuilder, request: Request, drafts: Sequence[int], num_after: int
    ) -> None:
        """Add a decode with draft tokens, as many as leave the `num_after` later requests budget
        and blocks."""
        num_tokens, block_size = request.num_tokens, self.pool.block_size
        num_spare = max(self.pool.num_free // self.layout.num_groups - num_after, 0)
        num_drafts = min(
            len(drafts),
            request.max_total_tokens - num_tokens - 1,
            builder.budget - num_after - 1,
            request.table.capacity + num_spare * block_size - num_tokens,
        )
        if self.rows.long_context_from is not None and not request.position_offset:
            num_drafts = min(num_drafts, self.rows.long_context_from - num_tokens)
        num_drafts = max(num_drafts, 0)
        blocks: list[int] = []
        while request.table.capacity < num_tokens + num_drafts:
            if not self._queues.make_room(request):
                return
            blocks += self.rows.grow(request)
        builder.add_decode(request, blocks, drafts[:num_drafts])

    def _add_work(self, builder: PlanBuilder, request: Request, num_wanted: int) -> None:
        """Compute more of a running request, as far as its blocks reach.

        It already has all of them, except that windowed layers allocate blocks step by step.
        """
        num_wanted = min(num_wanted, builder.budget)
        blocks: list[int] = []
        while request.table.capacity < request.num_computed + num_wanted:
            if not self._queues.make_room(request):
                num_wanted = request.table.capacity - request.num_computed
                break
            blocks += self.rows.grow(request)
        if request.atomic_spans:  # has_room has checked the budget, but blocks may be short
            end = request.num_computed + num_wanted
            if start_of_cut_span(request.atomic_spans, end) <= request.num_computed:
                num_wanted = 0
        if request.state is RUNNING and num_wanted > 0:
            builder.add(request, num_wanted, blocks)
        elif request.state is RUNNING and blocks:  # no step would carry these blocks
            self._queues.preempt(request)

    def _schedule_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting requests by rank.

        Only these are skipped: requests that are not ready, those that wait for another one to
        compute their prompt (a row is reserved for each), and those whose adapter is not loaded.
        Once a request finds no adapter slot, no later request with an adapter overtakes it, so that
        slots eventually become free.
        """
        index = num_kept_rows = self.num_deferred = 0
        has_slots = True
        while index < len(self.waiting) and builder.budget:
            request = self.waiting[index]
            if request.num_in_flight:  # preempted: wait until its tokens in flight are known
                return
            if request.extension is not None and not request.extension.is_ready(request):
                index = self.num_deferred = index + 1
                continue
            if self.rows.num_free_rows <= num_kept_rows:
                self._no_room_for = request
                return
            if not builder.has_room(request):
                return
            source = NO_SOURCE if request.siblings is None else find_source(request, builder)
            if source.wait:
                index = self.num_deferred = index + 1
                num_kept_rows += 1
                continue
            if self.adapters is not None and request.adapter is not None:
                ready = self.adapters.prepare(request.adapter) if has_slots else Readiness.NO_SLOT
                has_slots = ready is not Readiness.NO_SLOT
                if ready is not Readiness.READY:
                    index = self.num_deferred = index + 1
                    continue
            # Keep one block free for each running request, so that its next block does not require
            # preempting the request admitted now.
            if not self.rows.allocate(request, len(self.running), source):
                self._no_room_for = request
                return
            self._admit(builder, request, request.num_tokens - request.num_computed, source)

    def _schedule_suspects(self, builder: PlanBuilder) -> None:
        """Schedule only suspects, one step at a time. They can preempt all other requests."""
        if self._in_flight:
            return
        group = self.bisection.group  # members without room wait until others are cleared
        protected = {suspect.request.request_id for suspect in group}
        for suspect in group:
            request = suspect.request
            if not builder.has_room(request):
                return
            if request.state is RUNNING and self._needs_recompute(request):
                self._queues.requeue(request)
            if request.state is RUNNING:
                self._add_work(builder, request, suspect.num_wanted)
                continue
            ready = self._queues.prepare_by_preemption(request, protected)
            if ready and self._queues.allocate_by_preemption(request, protected):
                self._admit(builder, request, suspect.num_wanted)

    def _admit(
        self, builder: PlanBuilder, request: Request, num_wanted: int, source: Source = NO_SOURCE
    ) -> None:
        """Add a request that was just given a row to this step."""
        self._queues.admit(request)
        if request.num_cached_tokens is None:
            request.queue_s = time.monotonic() - request.arrived_s
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_prompt_tokens += min(request.num_computed, request.num_prompt_tokens)
            if source.request is not None:  # the shared tokens were computed for the same call
                request.num_cached_tokens = source.request.num_cached_tokens
            else:
                request.num_cached_tokens = request.num_computed
                self.pool.count_lookup(request.num_prompt_tokens, request.num_computed)
        builder.new_rows.append(new_row(request))
        num_wanted = min(num_wanted, request.table.capacity - request.num_computed)
        # Blocks that have left a window are never read, so any block number will do.
        builder.add(request, num_wanted, [max(block, 0) for block in request.table.blocks])

    # Process a result

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply the result of the oldest plan in flight."""
        builder = self._oldest(plan)
        _check_result(builder, result)
        self._in_flight.popleft()
        num_running, num_tokens, num_accepted = len(self.running), 0, 0
        block_size = self.pool.block_size
        updates: list[RequestUpdate] = []
        logprobs = result.logprobs or repeat(None, builder.num_samples)
        drawn, scores = zip(result.token_ids, logprobs, strict=True), iter(result.scores)
        for request, work in zip(builder.requests, builder.work, strict=True):
            request.num_in_flight -= 1
            token, logprob = next(drawn) if work.sample else _NOTHING_DRAWN
            rest = list(islice(drawn, len(work.draft_token_ids))) if work.draft_token_ids else ()
            found: Sequence[Score | None] = ()
            if work.is_scored:
                end = work.start + work.num_scored
                found = request.prompt_scores[work.start : end] = [*islice(scores, work.num_scored)]
            if request.state is FINISHED:
                self.num_wasted_row_steps += 1
            elif (work.sample and token is None) or None in found:
                updates.append(self._fail(request))
            elif rest:
                tokens = [token, *(token for token, _ in rest)]
                num_equal = count_accepted(work.draft_token_ids, tokens)
                taken = self._take_drafted(request, [(token, logprob), *rest[:num_equal]])
                updates += taken
                num_tokens += len(taken)
                num_accepted += num_equal
            else:
                num_computed = work.start + work.num_tokens
                if num_computed // block_size > request.table.num_published:
                    self.rows.on_full_blocks(request, num_computed)
                if work.snapshot is not None:
                    self.rows.publish_state(request, num_computed, work.snapshot)
                if token is not None:
                    update = (
                        request.append(token, logprob)
                        if request.extension is None
                        else request.extension.on_token(request, token, logprob)
                    )
                    is_output = update is None or update.error is None
                    num_tokens += is_output and not request.is_prompt_only
                    if update is not None:
                        updates.append(update)
                        if update.finish_reason is not None:
                            self.finish(request)
            if work.snapshot is not None:
                self.rows.release_snapshots([work])
            if request.state is not RUNNING and not request.num_in_flight:
                self._queues.release(request)
        if result.vectors:
            _add_vectors(builder, result, updates)
            num_tokens = 0
        self.num_generated_tokens += num_tokens
        if self.bisection.groups:
            self.bisection.on_success(list(zip(builder.requests, builder.work, strict=True)))
        if self.speculation is not None:
            self.speculation.end_step(
                plan.work,
                num_running=num_running,
                num_tokens=num_tokens,
                num_accepted=num_accepted,
                is_last=not self.requests,
            )
        return updates

    def _take_drafted(self, request: Request, drawn: Sequence[Drawn]) -> list[RequestUpdate]:
        """Append the tokens drawn after a known token and after each accepted draft token, up to
        the end of the output: at least one token.
        """
        updates: list[RequestUpdate] = []
        for token, logprob in drawn:
            if token is None:
                return [*updates, self._fail(request)]
            updates.append(request.append(token, logprob))
            if updates[-1].finish_reason is not None:
                break
        request.num_computed += len(updates) - 1
        request.num_tokens += len(updates) - 1
        if request.num_computed // self.pool.block_size > request.table.num_published:
            self.rows.on_full_blocks(request, request.num_computed)
        if updates[-1].finish_reason is not None:
            self.finish(request)
        return updates

    def fail(self, plan: StepPlan, error: str) -> list[RequestUpdate]:
        """Handle the failure of the oldest plan in flight, which voids the results of later ones.

        All requests of these plans are recomputed; those of the failed plan are bisected.
        """
        builder = self._oldest(plan)
        self.num_failed_steps += 1
        builders = list(self._in_flight)
        self._in_flight.clear()
        culprit = self.bisection.on_failure(list(zip(builder.requests, builder.work, strict=True)))
        updates = [] if culprit is None else [self._fail(culprit, error)]
        for void in builders:
            assert void.plan is not None
            for request in void.requests:
                self._queues.reset(request)
            self.rows.release_snapshots(void.work)
            if self.rows.swap is not None:
                for request in void.saved:  # the copies may not have been made
                    self.rows.swap.drop(request)
            # The runner may not have released these rows and filled these adapter slots.
            if self.adapters is not None:
                self.adapters.copy_again(void.plan.adapter_copies)
            self.rows.release_again(void.plan.released_rows)
        return updates

    def is_oldest(self, plan: StepPlan) -> bool:
        """Whether no earlier plan is in flight, and the result of this one was not applied."""
        return bool(self._in_flight) and self._in_flight[0].plan is plan

    def _oldest(self, plan: StepPlan) -> PlanBuilder:
        if not self.is_oldest(plan):
            raise ValueError(f"step {plan.step} is not the oldest step in flight")
        return self._in_flight[0]

    def _fail(self, request: Request, error: str | None = None) -> RequestUpdate:
        """End a request that made a step fail or, without an `error`, could not draw a token."""
        if error is None:
            error = request.no_token_error
        self.rows.forget(request)
        self.finish(request, error)
        return request.ended("error", error)

    # Invariants

    def check(self) -> None:
        """Raise AssertionError unless rows, blocks and queues agree. Costs O(num_blocks)."""
        broken = self._queues.violations()
        queued = [*self.running, *self.waiting]
        rules = {
            "every request is in one queue": len(queued) == len(self.requests)
            and all(self.requests.get(r.request_id) is r for r in queued),
            "an idle scheduler holds nothing": self.has_work or not any(self.rows.owners),
            "snapshots wait for steps": bool(self._in_flight)
            or self.pool.snapshots is None
            or not self.pool.snapshots.num_in_flight,
            "suspects are alive": all(
                self.requests.get(request.request_id) is request
                for request in self.bisection.members
            ),
        }
        broken += [rule for rule, holds in rules.items() if not holds]
        if self.speculation is not None:
            self.speculation.check(self.requests)
        if broken:
            raise AssertionError("scheduler: not true that " + "; nor that ".join(broken))


def _add_vectors(
    builder: PlanBuilder, result: StepResult, updates: Sequence[RequestUpdate]
) -> None:
    """Attach each finished request's vector to its update; if per-token vectors were requested,
    they come first."""
    sampled = [r for r, work in zip(builder.requests, builder.work, strict=True) if work.sample]
    vectors = {
        r.request_id: b"".join((*(s for s in r.prompt_scores if isinstance(s, bytes)), last))
        for r, last in zip(sampled, result.vectors, strict=True)
    }
    for update in updates:
        if update.error is None:
            update.vector, update.new_token_ids = vectors[update.request_id], ()


_NOTHING_DRAWN: tuple[None, None] = (None, None)


def _check_result(builder: PlanBuilder, result: StepResult) -> None:
    num_tokens, num_logprobs = len(result.token_ids), len(result.logprobs)
    expected = builder.num_samples, builder.num_scored
    if (num_tokens, len(result.scores)) != expected or num_logprobs not in (0, num_tokens):
        assert builder.plan is not None
        raise ValueError(
            f"step {builder.plan.step} draws {builder.num_samples} tokens and scores "
            f"{builder.num_scored}, but its result has {num_tokens} tokens, "
            f"{num_logprobs} logprobs and {len(result.scores)} scores"
        )
