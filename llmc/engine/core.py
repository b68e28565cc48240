"""EngineCore: requests in, steps through the runner, news of each request out.

    front --AddRequest--> EngineCore --StepPlan--> Runner
          <-RequestUpdate-            <-StepResult-

It knows token ids only; text, HTTP and processes are the front's. One request can't take the
engine down: what can't be served is refused on arrival, and a step that fails ends the requests
in it and no others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from llmc.engine.admission import Limits, admit, derive_seed
from llmc.engine.messages import AddRequest, EngineStats, RequestUpdate
from llmc.engine.plan import StepPlan, StepResult
from llmc.engine.scheduler import Scheduler
from llmc.errors import EngineDeadError, InvalidRequestError, QueueFullError

logger = logging.getLogger(__name__)


class Runner(Protocol):
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises EngineDeadError if no later step can succeed either."""


class EngineCore:
    """The engine's whole state; one thread drives it.

    `vocab_size` is the width of the model's logits. With `max_num_queued` None the queue has no
    limit.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        seed: int = 0,
        enable_prefix_caching: bool = True,
        max_num_queued: int | None = None,
    ) -> None:
        self._runner = runner
        self._limits = Limits(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            # A checkpoint may name an end token beyond its logits; it can't be drawn, and must
            # not become an index in the runner.
            eos_token_ids=frozenset(token for token in eos_token_ids if 0 <= token < vocab_size),
        )
        self._scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._seed = seed
        self._num_added = 0
        self._max_num_queued = max_num_queued

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises InvalidRequestError or QueueFullError, and then keeps nothing."""
        num_waiting = len(self._scheduler.waiting)
        if self._max_num_queued is not None and num_waiting >= self._max_num_queued:
            raise QueueFullError(
                f"{num_waiting} requests wait and the limit is {self._max_num_queued}; "
                "try again later"
            )
        if message.request_id in self._scheduler.requests:
            raise InvalidRequestError(
                f"a request with id {message.request_id!r} is being served; choose another id",
                param="request_id",
            )
        request = admit(message, self._limits, derive_seed(self._seed, self._num_added))
        self._num_added += 1
        self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request. None when it is unknown or over: no error, it may just have ended."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[RequestUpdate]:
        """Plan a step, run it, take in the result. An empty list says only that nobody has news."""
        plan = self._scheduler.schedule()
        if plan is None:
            self._check_progress()
            return []
        try:
            return self._scheduler.update(plan, self._runner.execute(plan))
        except Exception as error:
            return self._fail(plan, error)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        pool = scheduler.pool
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
            prefix_cache_queries=pool.num_queries,
            prefix_cache_hits=pool.num_hits,
        )

    def check(self) -> None:
        """Raise AssertionError if a block or a row has been lost. Meant for when it is idle."""
        self._scheduler.check()

    def _fail(self, plan: StepPlan, error: Exception) -> list[RequestUpdate]:
        """End the requests of a step that could not be run.

        This is the place to find the culprit instead: run parts of the plan again, and fail only
        the part that raises.
        """
        logger.error("step %d failed", plan.step, exc_info=error)
        updates = self._scheduler.fail(plan, f"the step failed: {type(error).__name__}: {error}")
        if isinstance(error, EngineDeadError):
            raise error
        return updates

    def _check_progress(self) -> None:
        """Requests that wait while nothing runs would wait for ever; better a loud end."""
        if self._scheduler.has_work and not self._scheduler.num_in_flight:
            stats = self.stats()
            raise EngineDeadError(
                f"the scheduler is stuck: {stats.num_waiting} requests wait and none runs, with "
                f"{stats.num_free_blocks} of {stats.num_blocks} blocks free; please report this"
            )
