"""Engine updates -> what the caller sees: text, log-probabilities, finish reasons, timings.

    Input --add()--> AddRequest messages (one per completion: n > 1 is n of them)
    RequestUpdate --apply()--> Completion of an ActiveRequest --> RequestOutput or deltas

With `best_of` more candidates are generated than are returned: the returned completions stay empty
until all candidates have ended, and then become the best of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from llmc.engine.messages import AddRequest, RequestUpdate
from llmc.errors import InvalidRequestError
from llmc.frontend.completion import Completion, PositionLogprobs, position
from llmc.frontend.inputs import Input
from llmc.outputs import FinishReason, RequestMetrics, RequestOutput
from llmc.sampling_params import SamplingParams
from llmc.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class ActiveRequest:
    """A request from its submission to its end, with all its completions."""

    request_id: str
    source: Input
    completions: list[Completion]  # what the caller sees
    candidates: list[Completion]  # what the engine generates: the same, but for best_of
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    ended: float | None = None
    num_cached_tokens: int = 0
    queue_s: float | None = None  # of the sequence that was scheduled first
    num_preemptions: int = 0  # of the sequence that had most
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    vector: bytes = b""  # float32, of a model that pools
    error: str | None = None
    is_refused: bool = False  # by the engine, which checks what the frontend can't

    @property
    def finished(self) -> bool:
        return self.ended is not None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.candidates)

    def child_id(self, index: int) -> str:
        return self.request_id if len(self.candidates) == 1 else f"{self.request_id}/{index}"

    def close_if_done(self) -> bool:
        if self.ended is None and all(c.finish_reason is not None for c in self.candidates):
            self.ended = time.monotonic()
            if self.candidates is not self.completions:
                best = sorted(self.candidates, key=_likelihood, reverse=True)
                for shown, chosen in zip(self.completions, best, strict=False):
                    shown.adopt(chosen)
        return self.finished

    def output(self) -> RequestOutput:
        """A snapshot that later updates don't touch."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.source.prompt,
            prompt_token_ids=self.source.prompt_token_ids,
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self._metrics(),
            error=self.error,
        )

    def _metrics(self) -> RequestMetrics | None:
        if self.ended is None or self.first_token is None or self.queue_s is None:
            return None
        return RequestMetrics(
            queue_s=self.queue_s,
            time_to_first_token_s=self.first_token - self.submitted,
            end_to_end_s=self.ended - self.submitted,
        )


class OutputProcessor:
    """All requests in flight on this side of the engine, by the ids that the engine knows."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.active: dict[str, ActiveRequest] = {}
        self._owners: dict[str, tuple[ActiveRequest, Completion]] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._owners)

    def add(
        self, request_id: str, source: Input, priority: int = 0
    ) -> tuple[ActiveRequest, list[AddRequest]]:
        """Register a request; returns it with the messages for the engine."""
        if request_id in self.active:
            raise InvalidRequestError(
                f"request id {request_id!r} is in use; give each request a different one",
                param="request_id",
                code="duplicate_request_id",
            )
        sampling = source.sampling
        num_generated = sampling.best_of or sampling.n
        candidates = [Completion(i, source, self._tokenizer) for i in range(num_generated)]
        shown = candidates
        if num_generated > sampling.n:
            shown = [Completion(i, source, self._tokenizer) for i in range(sampling.n)]
        request = ActiveRequest(
            request_id=request_id, source=source, completions=shown, candidates=candidates
        )
        messages = []
        for completion in candidates:
            child = request.child_id(completion.index)
            self._owners[child] = (request, completion)
            messages.append(
                AddRequest(
                    request_id=child,
                    prompt_token_ids=source.prompt_token_ids,
                    sampling=_for_child(sampling, completion.index),
                    priority=priority,
                    cache_salt=source.cache_salt,
                    adapter=source.adapter,
                    images=source.images,
                    fork_of=request.child_id(0) if completion.index else None,
                )
            )
        self.active[request_id] = request
        return request, messages

    def apply(self, updates: Iterable[RequestUpdate]) -> tuple[list[ActiveRequest], list[str]]:
        """Returns the requests that changed, and the engine ids to abort (a stop string hit)."""
        changed: dict[str, ActiveRequest] = {}
        aborts: list[str] = []
        for update in updates:
            owner = self._owners.get(update.request_id)
            if owner is None:
                continue  # aborted here while the engine was still at it
            request, completion = owner
            if (update.new_token_ids or update.vector) and request.first_token is None:
                request.first_token = time.monotonic()
            if completion.index == 0 and len(completion.token_ids) == 0:
                self._take_scores(request, update)
            request.num_cached_tokens = max(request.num_cached_tokens, update.num_cached_tokens)
            request.num_preemptions = max(request.num_preemptions, update.num_preemptions)
            if request.queue_s is None:
                request.queue_s = update.queue_s
            request.vector = update.vector
            completion.apply(update)
            if update.error is not None:
                request.error, request.is_refused = update.error, update.is_refused
            if completion.finish_reason is not None:
                del self._owners[update.request_id]
                if update.finish_reason is None:
                    aborts.append(update.request_id)
            if request.close_if_done():
                self.active.pop(request.request_id, None)
            changed[request.request_id] = request
        return list(changed.values()), aborts

    def owners(self, engine_ids: Iterable[str]) -> set[str]:
        """The requests that these sequences of the engine belong to; unknown ones to none."""
        return {self._owners[one][0].request_id for one in engine_ids if one in self._owners}

    def _take_scores(self, request: ActiveRequest, update: RequestUpdate) -> None:
        """With the first token of the one that was asked for them: the prompt's."""
        if request.source.sampling.prompt_logprobs is not None and update.new_token_ids:
            scores = [position(item, self._tokenizer) for item in update.prompt_logprobs]
            request.prompt_logprobs = [None, *scores]

    def abort(
        self, request_id: str, reason: FinishReason = "abort", error: str | None = None
    ) -> list[str]:
        """Forget a request; returns the engine ids that are still running. Unknown: none."""
        request = self.active.pop(request_id, None)
        if request is None:
            return []
        request.error = error
        running = []
        for completion in request.candidates:
            if completion.finish_reason is None:
                child = request.child_id(completion.index)
                self._owners.pop(child, None)
                running.append(child)
                completion.abandon(reason)
        request.close_if_done()
        return running


def _for_child(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of one completion, which is a separate request to the engine."""
    num_generated = sampling.best_of or sampling.n
    if num_generated == 1:
        return sampling
    seed = sampling.seed
    if seed is not None:
        # Stay within 64 bits: the largest seed wraps to the smallest.
        seed = (seed + index + 2**63) % 2**64 - 2**63
    logprobs = sampling.logprobs
    if num_generated > sampling.n and logprobs is None:
        logprobs = 0  # those of the drawn tokens, to choose by
    return dataclasses.replace(
        sampling,
        n=1,
        best_of=None,
        seed=seed,
        logprobs=logprobs,
        prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,  # one prompt for all
    )


def _likelihood(completion: Completion) -> tuple[bool, float]:
    """What best_of chooses by; a completion that was cut off or failed comes last."""
    ended_well = completion.finish_reason in ("stop", "length")
    return ended_well, completion.cumulative_logprob
