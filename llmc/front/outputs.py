"""Engine updates -> what the caller sees: text, log-probabilities, finish reasons, timings.

    Input --add()--> AddRequest messages (one per completion: n > 1 is n of them)
    RequestUpdate --apply()--> Completion of an ActiveRequest --> RequestOutput or deltas

Text lives in pieces and readers keep a position, so a delta costs what it adds, not what was said
before. A reader that falls behind finds the pieces merged: nothing queues up.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmc.engine.messages import AddRequest, RequestUpdate
from llmc.engine.plan import TokenLogprobs
from llmc.errors import InvalidRequestError
from llmc.front.inputs import Input
from llmc.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from llmc.sampling_params import SamplingParams
from llmc.text.detokenizer import Detokenizer
from llmc.text.tokenizer import Tokenizer

PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """What one completion gained since the reader last looked."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(slots=True)
class Cursor:
    """A reader's position in one completion."""

    pieces: int = 0
    tokens: int = 0
    finished: bool = False


class Completion:
    """One sequence being generated: its tokens, its text so far, and how it ended."""

    def __init__(self, index: int, source: Input, tokenizer: Tokenizer | None) -> None:
        sampling = source.sampling
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = [] if sampling.logprobs is not None else None
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._pieces: list[str] = []
        self._include_stop = sampling.include_stop_str_in_output
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and sampling.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                source.prompt_token_ids,
                stop=sampling.stop_strings,
                include_stop=self._include_stop,
                skip_special_tokens=sampling.skip_special_tokens,
                min_tokens=sampling.min_tokens,
            )

    def apply(self, update: RequestUpdate) -> None:
        """Take the engine's news. Afterwards `finish_reason` may be set, also by a stop string."""
        self.token_ids.extend(update.new_token_ids)
        if self.logprobs is not None:
            self.logprobs.extend(map(self._position, update.logprobs))
            self.cumulative_logprob += sum(item.logprob for item in update.logprobs)
        if self._detokenizer is None:
            self._end(update.finish_reason, update.stop_reason)
            return
        tokens = update.new_token_ids
        if update.finish_reason == "stop" and not self._include_stop:
            tokens = tokens[:-1]  # the stop token ends the text and is no part of it
        self._say(self._detokenizer.push(tokens))
        if update.finish_reason is not None:
            self._say(self._detokenizer.finish())
        if self._detokenizer.stopped_by is not None:
            self._end("stop", self._detokenizer.stopped_by)
        else:
            self._end(update.finish_reason, update.stop_reason)

    def abandon(self, reason: FinishReason) -> None:
        """End it from this side: the caller gave up, or the engine died."""
        if self.finish_reason is None:
            if self._detokenizer is not None:
                self._say(self._detokenizer.finish())
            self._end(reason, None)

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self._text(),
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob if self.logprobs is not None else None,
            logprobs=list(self.logprobs) if self.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def delta(self, cursor: Cursor) -> CompletionDelta | None:
        """What came after `cursor`, which moves on; None when there is nothing to say."""
        text = "".join(self._pieces[cursor.pieces :])
        token_ids = self.token_ids[cursor.tokens :]
        ended = self.finish_reason is not None and not cursor.finished
        if not text and not token_ids and not ended:
            return None
        logprobs = self.logprobs[cursor.tokens :] if self.logprobs is not None else ()
        cursor.pieces, cursor.tokens = len(self._pieces), len(self.token_ids)
        cursor.finished = self.finish_reason is not None
        return CompletionDelta(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _text(self) -> str:
        return "".join(self._pieces)

    def _end(self, reason: FinishReason | None, stop_reason: int | str | None) -> None:
        if reason is not None:
            self.finish_reason = reason
            self.stop_reason = stop_reason

    def _position(self, item: TokenLogprobs) -> PositionLogprobs:
        chosen = {item.token_id: self._logprob(item.token_id, item.logprob, item.rank)}
        for rank, (token, value) in enumerate(
            zip(item.top_token_ids, item.top_logprobs, strict=True), start=1
        ):
            if token not in chosen:
                chosen[token] = self._logprob(token, value, rank)
        return chosen

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        text = self._tokenizer.token_text(token) if self._tokenizer is not None else None
        return Logprob(logprob=float(value), rank=rank, decoded_token=text)


@dataclass(slots=True, kw_only=True)
class ActiveRequest:
    """A request from its submission to its end, with all its completions."""

    request_id: str
    source: Input
    completions: list[Completion]
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    ended: float | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.ended is not None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    def child_id(self, index: int) -> str:
        return self.request_id if len(self.completions) == 1 else f"{self.request_id}/{index}"

    def close_if_done(self) -> bool:
        if self.ended is None and all(c.finish_reason is not None for c in self.completions):
            self.ended = time.monotonic()
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
            metrics=self._metrics(),
            error=self.error,
        )

    def _metrics(self) -> RequestMetrics | None:
        if self.ended is None or self.first_token is None:
            return None
        return RequestMetrics(
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
        """Register a request; the messages are what the engine must be told."""
        if request_id in self.active:
            raise InvalidRequestError(
                f"request id {request_id!r} is in use; give each request its own",
                param="request_id",
                code="duplicate_request_id",
            )
        request = ActiveRequest(
            request_id=request_id,
            source=source,
            completions=[
                Completion(index, source, self._tokenizer) for index in range(source.sampling.n)
            ],
        )
        messages = []
        for completion in request.completions:
            child = request.child_id(completion.index)
            self._owners[child] = (request, completion)
            messages.append(
                AddRequest(
                    request_id=child,
                    prompt_token_ids=source.prompt_token_ids,
                    sampling=_for_child(source.sampling, completion.index),
                    priority=priority,
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
            if update.new_token_ids and request.first_token is None:
                request.first_token = time.monotonic()
            request.num_cached_tokens = max(request.num_cached_tokens, update.num_cached_tokens)
            completion.apply(update)
            if update.error is not None:
                request.error = update.error
            if completion.finish_reason is not None:
                del self._owners[update.request_id]
                if update.finish_reason is None:
                    aborts.append(update.request_id)
            if request.close_if_done():
                self.active.pop(request.request_id, None)
            changed[request.request_id] = request
        return list(changed.values()), aborts

    def abort(
        self, request_id: str, reason: FinishReason = "abort", error: str | None = None
    ) -> list[str]:
        """Forget a request; returns the engine ids that are still running. Unknown: none."""
        request = self.active.pop(request_id, None)
        if request is None:
            return []
        request.error = error
        running = []
        for completion in request.completions:
            if completion.finish_reason is None:
                child = request.child_id(completion.index)
                self._owners.pop(child, None)
                running.append(child)
                completion.abandon(reason)
        request.close_if_done()
        return running


def _for_child(sampling: SamplingParams, index: int) -> SamplingParams:
    """Completions of one request differ by their seed; each is a request of its own."""
    if sampling.n == 1:
        return sampling
    seed = sampling.seed
    if seed is not None:
        # Stay within 64 bits: the largest seed wraps to the smallest.
        seed = (seed + index + 2**63) % 2**64 - 2**63
    return dataclasses.replace(sampling, n=1, seed=seed)
