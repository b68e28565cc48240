"""Scheduler: decides what each step computes, and takes in what came of it.

    waiting --admit--> running --update--> finished
       ^                  |
       +----- preempt ----+      latest arrival first, when blocks run out; recomputed later

Order is first come, first served. `running` and `waiting` are both sorted by arrival, and all of
`running` came before all of `waiting`. A step takes one token of each running decode, then what
is left of running prompts, then new prompts, until its token budget is spent.

`schedule()` may be called again before `update()` of the step before: counts advance when a step
is planned, and tokens in flight are known by number only. Results come in the order of the plans.
A row and its blocks are given back only when no step in flight uses them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from llmc.engine.block_pool import BlockPool
from llmc.engine.messages import RequestUpdate
from llmc.engine.plan import NewRow, RowWork, StepPlan, StepResult, TokenLogprobs
from llmc.engine.request import Request, RequestState
from llmc.engine.row_table import RowTable, new_row

RUNNING = RequestState.RUNNING
FINISHED = RequestState.FINISHED


@dataclass(slots=True)
class _Draft:
    """A plan while it is being made; kept until its result comes."""

    budget: int
    work: list[RowWork] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)  # aligned with `work`
    new_rows: list[NewRow] = field(default_factory=list)
    num_samples: int = 0
    plan: StepPlan | None = None


class Scheduler:
    """Continuous batching over `max_num_seqs` rows and one BlockPool."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError(
                "max_num_seqs and max_num_batched_tokens must be positive, "
                f"got {max_num_seqs} and {max_num_batched_tokens}"
            )
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
        self.rows = RowTable(max_num_seqs, self.pool)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.running: list[Request] = []
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished = 0
        self._num_arrivals = 0
        self._in_flight: deque[_Draft] = deque()
        self._num_leaving = 0  # requests off the running list that still hold a row

    # Requests come and go

    def add(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id!r} is already here")
        if self.pool.blocks_for(request.max_total_tokens) > self.pool.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} can grow to {request.max_total_tokens} tokens; "
                f"the pool holds {self.pool.num_blocks} blocks of {self.pool.block_size}"
            )
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.waiting[request.request_id] = request

    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request now; None if there is no such request, or it has just finished."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._finish(request)
        return RequestUpdate(
            request_id=request_id,
            finish_reason="abort",
            num_cached_tokens=request.num_cached_tokens,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and whose result has not come."""
        return len(self._in_flight)

    # Plan a step

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run (before a result in flight has come)."""
        draft = _Draft(self.max_num_batched_tokens)
        for request in self._plan_decodes(draft):
            if draft.budget == 0:
                break
            self._put(draft, request, request.num_tokens - request.num_computed, ())
        self._plan_waiting(draft)
        if not draft.work:
            return None
        draft.plan = StepPlan(
            step=self.num_steps,
            work=draft.work,
            new_rows=draft.new_rows,
            released_rows=self.rows.pop_released(),
        )
        self.num_steps += 1
        self._in_flight.append(draft)
        return draft.plan

    def _plan_decodes(self, draft: _Draft) -> list[Request]:
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
            if request.num_tokens - request.num_computed != 1:
                prefills.append(request)
            elif request.num_tokens >= request.max_total_tokens:
                pass  # its last token is in flight
            elif request.num_tokens <= request.capacity:
                self._put(draft, request, 1, ())
            elif self._make_room(request):
                self._put(draft, request, 1, (self.rows.grow(request),))
        return prefills

    def _plan_waiting(self, draft: _Draft) -> None:
        while self.waiting and self.rows.has_free_row and draft.budget:
            request = next(iter(self.waiting.values()))
            # A preempted request comes back when the tokens it had in flight are known.
            # One block stays free for each running request: whoever is let in should not have to
            # be preempted by the others' very next growth.
            if request.num_in_flight or not self.rows.seat(request, len(self.running)):
                break
            del self.waiting[request.request_id]
            self.running.append(request)
            request.state = RUNNING
            self._count_first(request)
            draft.new_rows.append(new_row(request))
            self._put(draft, request, request.num_tokens - request.num_computed, request.blocks[:])

    def _count_first(self, request: Request) -> None:
        if not request.was_scheduled:
            request.was_scheduled = True
            request.num_cached_tokens = request.num_computed
            self.num_prompt_tokens += request.num_prompt_tokens
            self.pool.count_lookup(request.num_prompt_tokens, request.num_computed)

    def _put(
        self, draft: _Draft, request: Request, num_wanted: int, new_blocks: Sequence[int]
    ) -> None:
        assert request.row is not None
        start = request.num_computed
        num_tokens = min(num_wanted, draft.budget)
        sample = num_tokens == num_wanted
        request.num_computed = start + num_tokens
        request.num_tokens += sample
        request.num_in_flight += 1
        draft.budget -= num_tokens
        draft.num_samples += sample
        draft.requests.append(request)
        draft.work.append(
            RowWork(
                row=request.row,
                start=start,
                num_tokens=num_tokens,
                sample=sample,
                new_blocks=new_blocks,
            )
        )

    # Room

    def _make_room(self, request: Request) -> bool:
        """See that a block is free, preempting if need be. False: not in this step.

        A victim goes to the head of the queue, where it needs more than it just gave up, so this
        step can't let it in again.
        """
        while self.pool.num_free == 0:
            if self._num_leaving:  # blocks come back with the step in flight; wait for them
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        assert request is self.running[-1], "only the latest arrival may be preempted"
        self.running.pop()
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        request.state = RequestState.PREEMPTED
        self.num_preemptions += 1
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """A request stopped running: take its row and blocks back, now or when steps are done."""
        if request.num_in_flight:
            self._num_leaving += 1
        else:
            self.rows.unseat(request)

    # Take in a result

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply the result of the oldest plan in flight."""
        draft = self._oldest(plan)
        tokens, logprobs = result.token_ids, result.logprobs or repeat(None, draft.num_samples)
        if len(tokens) != draft.num_samples or len(result.logprobs) not in (0, len(tokens)):
            raise ValueError(
                f"step {plan.step} samples {draft.num_samples} rows, but its result has "
                f"{len(tokens)} tokens and {len(result.logprobs)} logprobs"
            )
        self._in_flight.popleft()
        block_size = self.pool.block_size
        updates: list[RequestUpdate] = []
        drawn = zip(tokens, logprobs, strict=True)
        for request, work in zip(draft.requests, plan.work, strict=True):
            request.num_in_flight -= 1
            token, logprob = next(drawn) if work.sample else _NOTHING_DRAWN
            if request.state is FINISHED:
                pass  # ended while this step was in flight: its work is dropped
            elif work.sample and token is None:
                updates.append(self._fail_request(request, _NOT_FINITE))
            else:
                num_computed = work.start + work.num_tokens
                if num_computed // block_size > request.num_published:
                    self.rows.publish(request, num_computed)
                if token is not None:
                    updates.append(self._take_token(request, token, logprob))
            if request.state is not RUNNING and not request.num_in_flight:
                self._settle(request)
        return updates

    def fail(self, plan: StepPlan, error: str) -> list[RequestUpdate]:
        """The oldest plan in flight could not be run: its requests end, all others go on."""
        draft = self._oldest(plan)
        self._in_flight.popleft()
        # The runner may not have heard of the rows that this plan released; say it again.
        self.rows.release_again(plan.released_rows)
        updates: list[RequestUpdate] = []
        for request in draft.requests:
            request.num_in_flight -= 1
            if request.state is not FINISHED:
                updates.append(self._fail_request(request, error))
            if not request.num_in_flight:
                self._settle(request)
        return updates

    def _oldest(self, plan: StepPlan) -> _Draft:
        if not self._in_flight or self._in_flight[0].plan is not plan:
            raise ValueError(f"step {plan.step} is not the oldest step in flight")
        return self._in_flight[0]

    def _take_token(
        self, request: Request, token: int, logprob: TokenLogprobs | None
    ) -> RequestUpdate:
        request.token_ids.append(token)
        self.num_generated_tokens += 1
        update = RequestUpdate(
            request_id=request.request_id,
            new_token_ids=(token,),
            logprobs=() if logprob is None else (logprob,),
            num_cached_tokens=request.num_cached_tokens,
        )
        num_tokens = len(request.token_ids)
        if (
            token in request.stop_token_ids
            and num_tokens - request.num_prompt_tokens > request.sampling.min_tokens
        ):
            update.finish_reason = "stop"
            update.stop_reason = None if token in request.eos_token_ids else token
            self._finish(request)
        elif num_tokens >= request.max_total_tokens:
            update.finish_reason = "length"
            self._finish(request)
        return update

    def _fail_request(self, request: Request, error: str) -> RequestUpdate:
        self.pool.forget(request.blocks)  # nobody else should read what led to this
        self._finish(request)
        return RequestUpdate(
            request_id=request.request_id,
            finish_reason="error",
            num_cached_tokens=request.num_cached_tokens,
            error=error,
        )

    def _finish(self, request: Request) -> None:
        was_running = request.state is RUNNING
        request.state = FINISHED
        del self.requests[request.request_id]
        self.num_finished += 1
        if was_running:
            self.running.remove(request)
            self._leave(request)
        else:
            del self.waiting[request.request_id]

    def _settle(self, request: Request) -> None:
        """The last step that used a request that left is done."""
        if request.row is not None:
            self._num_leaving -= 1
            self.rows.unseat(request)

    # Invariants

    def check(self) -> None:
        """Raise AssertionError unless rows, blocks and queues agree. Costs O(num_blocks)."""
        self.rows.check()
        owners = [request for request in self.rows.owners if request is not None]
        leaving = [request for request in owners if request.state is not RUNNING]
        queued = [*self.running, *self.waiting.values()]
        arrivals = [request.arrival for request in queued]
        rules = {
            "running requests own rows": len(owners) - len(leaving) == len(self.running),
            "who left and owns a row is in flight": all(r.num_in_flight for r in leaving),
            "leaving requests are counted": len(leaving) == self._num_leaving,
            "queues are in order of arrival": arrivals == sorted(arrivals),
            "every request is in one queue": len(queued) == len(self.requests)
            and all(self.requests.get(r.request_id) is r for r in queued),
            "an idle scheduler holds nothing": self.has_work or not owners,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise AssertionError("scheduler: not true that " + "; nor that ".join(broken))


_NOTHING_DRAWN: tuple[None, None] = (None, None)
_NOT_FINITE = (
    "the model's logits for this request were not finite (NaN or infinity), so no token could be "
    "drawn; the weights or the number format may be at fault"
)
