"""EngineCore: requests in, steps through the runner, updates of each request out.

    frontend --AddRequest--> EngineCore --StepPlan--> Runner
             <-RequestUpdate-            <-StepResult-

It only deals with token ids; text, HTTP and processes belong to the frontend. One request cannot
take the engine down: invalid requests are refused on arrival, and a failing step ends only the
request that causes the failure (fault_bisection.py).

Up to `max_in_flight` steps are in flight at a time, so that the runner starts the next one without
waiting for the host. If only the host can detect that a request has ended, each further step in
flight computes one token too many for it; these tokens are dropped and counted.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from concurrent.futures import Future

from llmc.engine.adapters import AdapterSlots
from llmc.engine.admission import Limits, admit, derive_seed
from llmc.engine.beam_search import BeamSearch
from llmc.engine.grammar import Constraint, wait_for_any
from llmc.engine.messages import (
    AddRequest,
    EngineState,
    EngineStats,
    Operate,
    OperationResult,
    RequestUpdate,
)
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.parallel_sampling import same_prompt
from llmc.engine.plan import PendingStep, Runner, StepPlan, StepResult
from llmc.engine.request import Request
from llmc.engine.scheduler import Scheduler
from llmc.engine.state import collect_state
from llmc.errors import EngineDeadError, InvalidRequestError, LlmcError, QueueFullError
from llmc.image_input import longest
from llmc.sampling_params import BeamSearchParams

logger = logging.getLogger(__name__)


class EngineCore:
    """The engine's whole state; one thread drives it."""

    def __init__(self, runner: Runner, limits: EngineLimits, features: EngineFeatures) -> None:
        self.runner = runner
        self._features = features
        self._compiling: dict[str, Constraint] = {}  # by request
        self._max_in_flight = runner.max_in_flight if features.async_scheduling else 1
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self.scheduler = Scheduler(limits, features)
        self._limits = limits
        self._admission = Limits(
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            pool_tokens=self.scheduler.layout.longest(limits.num_blocks),
            eos_token_ids=frozenset(features.eos_token_ids),
        )
        self._num_added = 0

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises InvalidRequestError or QueueFullError, leaving no trace of it."""
        num_waiting, limit = len(self.scheduler.waiting), self._limits.max_num_queued
        if limit is not None and num_waiting >= limit:
            raise QueueFullError(
                f"{num_waiting} requests wait and the limit is {limit}; try again later"
            )
        request_id = message.request_id
        if request_id in self.scheduler.requests:
            raise InvalidRequestError(
                f"a request with id {request_id!r} is being served; choose another id",
                param="request_id",
            )
        request = admit(message, self._admission, derive_seed(self._features.seed, self._num_added))
        self._check_adapter(request)
        self._set_atomic_parts(request)
        args = request.sampling.extra_args
        if args is not None and self._features.row_states is not None:
            request.row_state = self._features.row_states.begin(args, message.prompt_token_ids)
        sibling = self._sibling(message.fork_of, request)
        self._begin_grammar(request)
        self.scheduler.add(request, sibling)
        self._num_added += 1

    def search(self, message: AddRequest, params: BeamSearchParams) -> BeamSearch:
        """Queue a beam search. The returned object tracks it; `abort` with its id ends it."""
        if params.beam_width > self._limits.max_num_seqs:
            raise InvalidRequestError(
                f"beam_width {params.beam_width} needs one row per beam, but the engine has "
                f"{self._limits.max_num_seqs}; raise max_num_seqs",
                param="beam_width",
            )
        members = []
        for index in range(params.beam_width):
            one = dataclasses.replace(message, request_id=f"{message.request_id}/beam-{index}")
            members.append(admit(one, self._admission, default_seed=0))
            self._set_atomic_parts(members[-1])
        self._check_adapter(members[0])
        search = BeamSearch(params, members, self.scheduler)
        for member in members:
            can_share = self._features.share_prompts and member is not members[0]
            self.scheduler.add(member, members[0] if can_share else None)
        return search

    def _set_atomic_parts(self, request: Request) -> None:
        """Set which parts of the prompt must be computed in one step."""
        if self._features.whole_images and request.images:
            request.atomic_spans = [span for image in request.images for span in image.spans]
            request.min_step_tokens = max(1, longest(request.images))
        if self._features.whole_prompts:
            request.min_step_tokens = request.num_prompt_tokens
        if self._features.one_prompt:
            request.min_step_tokens = self._limits.max_num_batched_tokens

    def _check_adapter(self, request: Request) -> None:
        if request.adapter is None:
            return
        if self._features.adapters is None:
            raise InvalidRequestError(
                "LoRA is not enabled in this engine; start it with enable_lora (--enable-lora)",
                param="lora_request",
            )
        self._features.adapters.check(request.adapter)

    def _end_failed(self, adapters: AdapterSlots) -> list[RequestUpdate]:
        """End the requests whose adapters could not be loaded."""
        failed = adapters.pop_failed()
        if not failed:
            return []
        return [
            self._end(request.request_id, failed[request.adapter])
            for request in list(self.scheduler.requests.values())
            if request.adapter in failed and not request.is_finished
        ]

    def _end(self, request_id: str, error: str) -> RequestUpdate:
        """End a waiting request, whose grammar may still be compiling."""
        self._compiling.pop(request_id, None)
        return self.scheduler.fail_request(request_id, error)

    def _begin_grammar(self, request: Request) -> None:
        spec, grammars = request.sampling.structured_outputs, self._features.grammars
        if spec is None or request.is_prompt_only:
            return
        if grammars is None:
            raise InvalidRequestError(
                "structured outputs are not available in this engine", param="structured_outputs"
            )
        constraint = request.extension = Constraint(grammars.begin(spec))
        self._compiling[request.request_id] = constraint  # the next step starts it if it is done

    def _start_compiled(self) -> list[RequestUpdate]:
        """Start the requests whose grammars are compiled; end those whose grammars failed to."""
        updates = []
        for request_id, constraint in list(self._compiling.items()):
            if constraint.is_compiled:
                try:
                    constraint.start()
                except Exception as error:  # third-party code: any exception ends this request only
                    logger.warning("request %r: %s", request_id, error)
                    failed = self._end(request_id, str(error))
                    failed.is_refused = True
                    updates.append(failed)
                else:
                    del self._compiling[request_id]
        return updates

    def _sibling(self, fork_of: str | None, request: Request) -> Request | None:
        """The request to share a prompt with, if it has not finished and sharing is on."""
        sibling = None if fork_of is None else self.scheduler.requests.get(fork_of)
        if sibling is None or not self._features.share_prompts:
            return None
        if not same_prompt(request, sibling):
            raise InvalidRequestError(
                f"fork_of names {fork_of!r}, which has another prompt, adapter or cache salt; "
                "only sequences of one prompt can share its blocks",
                param="fork_of",
            )
        return sibling

    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request. Returns None if it is unknown, as it may have just finished."""
        self._compiling.pop(request_id, None)
        return self.scheduler.abort(request_id)

    def step(self) -> list[RequestUpdate]:
        """Keep the runner busy and process the oldest result. The list may be empty."""
        updates = self._start_compiled() if self._compiling else []
        while len(self._in_flight) < self._max_in_flight:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._in_flight.append((plan, self._submit(plan)))
        adapters = self.scheduler.adapters
        if adapters is not None:
            updates += self._end_failed(adapters)
        if not self._in_flight:
            if self._compiling:
                wait_for_any(self._compiling.values())
            elif not updates and not (adapters is not None and adapters.wait_for_any()):
                self._check_progress()
            return updates
        plan, pending = self._in_flight.popleft()
        try:
            return updates + self.scheduler.update(plan, pending.result())
        except Exception as error:
            if not self.scheduler.is_oldest(plan):  # it succeeded: running it again won't help
                raise EngineDeadError(
                    f"the result of step {plan.step} could not be processed: "
                    f"{type(error).__name__}: {error}; please report this"
                ) from error
            return updates + self._fail(plan, error)

    def use_idle_time(self) -> bool:
        """Do a small piece of work that would otherwise delay a step, such as capturing a CUDA
        graph. To be called when idle. -> whether there may be more to do."""
        speculation = self.scheduler.speculation
        return self.runner.use_idle_time(has_work=self.has_work) or (
            speculation is not None and speculation.use_idle_time(has_work=self.has_work)
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        pool, speculation, swap = scheduler.pool, scheduler.speculation, scheduler.rows.swap
        eager = self.runner.eager_steps
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_finished=scheduler.num_finished,
            num_steps=scheduler.num_steps,
            num_swaps=swap.num_swaps if swap else 0,
            num_failed_steps=scheduler.num_failed_steps,
            num_wasted_row_steps=scheduler.num_wasted_row_steps,
            num_runtime_compiles=self.runner.num_runtime_compiles,
            prefix_cache_queries=pool.num_queries,
            prefix_cache_hits=pool.num_hits,
            num_drafts=speculation.num_drafts if speculation else 0,
            num_draft_tokens=speculation.num_draft_tokens if speculation else 0,
            num_accepted_tokens=speculation.num_accepted_tokens if speculation else 0,
            num_deferred=min(scheduler.num_deferred, len(scheduler.waiting)),
            num_cached_prompt_tokens=scheduler.num_cached_prompt_tokens,
            num_step_tokens=scheduler.num_step_tokens,
            num_eager_not_captured=eager.get("not_captured", 0),
            num_eager_images=eager.get("images", 0),
            num_eager_long_prompts=eager.get("long_prompts", 0),
            num_eager_too_large=eager.get("too_large", 0),
            step_sizes=tuple(scheduler.step_sizes),
        )

    def run_operation(self, order: Operate) -> OperationResult:
        """Carry out an operator's order. A failure is reported and has no other effect."""
        try:
            match order.operation:
                case "reset_prefix_cache":
                    result = f"dropped {self.scheduler.pool.reset_prefix_cache()} cached blocks"
                case "release_caches":
                    result = f"released {self.release_caches()} bytes of caches"
                case "start_profile":
                    self.runner.start_profile()
                    result = "profiling started"
                case "stop_profile":
                    result = self.runner.stop_profile(order.folder)
        except (LlmcError, OSError, RuntimeError) as error:
            return OperationResult(number=order.number, error=str(error))
        return OperationResult(number=order.number, result=result)

    def release_caches(self) -> int:
        """Release the caches' memory to the system until a request needs it. -> bytes released.

        Raises RuntimeError while there are requests, or if the runner does not support it.
        """
        if self.scheduler.requests:
            raise RuntimeError(f"{len(self.scheduler.requests)} requests are using the caches")
        given = self.runner.release_caches()
        self.scheduler.pool.reset_prefix_cache()
        if self.scheduler.speculation is not None:
            given += self.scheduler.speculation.release_caches()
        return given

    def state(self) -> EngineState:
        """Rows, blocks and queues, for monitoring."""
        return collect_state(self.scheduler, self._limits, self.stats())

    def check(self) -> None:
        """Raise AssertionError if a block or a row was leaked. To be called when idle."""
        self.scheduler.check()

    def _submit(self, plan: StepPlan) -> PendingStep:
        """Submit a step. One that can't be submitted is a step that failed: it is in flight too."""
        try:
            return self.runner.submit(plan)
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def _fail(self, plan: StepPlan, error: Exception) -> list[RequestUpdate]:
        """A step failed: wait for the steps after it, and search for the request that caused it."""
        logger.error("step %d of %d requests failed", plan.step, len(plan.work), exc_info=error)
        fatal = error if isinstance(error, EngineDeadError) else self._drain()
        updates = self.scheduler.fail(plan, f"the step failed: {type(error).__name__}: {error}")
        if fatal is not None:
            self._in_flight.clear()
            raise fatal
        for update in updates:
            logger.error("ended request %r because it makes steps fail", update.request_id)
        return updates

    def _drain(self) -> EngineDeadError | None:
        """Wait for the steps after a failed one and discard their results. Returns the error if
        one of them shows that the engine is dead."""
        while self._in_flight:
            _, pending = self._in_flight.popleft()
            try:
                pending.result()
            except EngineDeadError as fatal:
                return fatal
            except Exception as error:
                logger.info("a step after the failed one failed too: %s", error)
        return None

    def _check_progress(self) -> None:
        """Raise if requests wait while nothing runs, since they would wait forever."""
        if self.scheduler.has_work and not self.scheduler.num_in_flight:
            stats = self.stats()
            raise EngineDeadError(
                f"the scheduler is stuck: {stats.num_waiting} requests waiting, none running, "
                f"{stats.num_free_blocks} of {stats.num_blocks} blocks free; please report this"
            )
