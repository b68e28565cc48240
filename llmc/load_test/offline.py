"""Benchmarks an engine in this process: token ids in, token ids out, every step timed.

The engine is driven directly, without tokenization, so that a trace has the time of each token and
not just of each answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.engine.messages import AddRequest, EngineStats
from llmc.errors import InvalidRequestError, LlmcError
from llmc.load_test.metrics import RequestTrace
from llmc.load_test.workloads import BenchRequest
from llmc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmc.frontend.engine_options import Engine
    from llmc.model_info import ModelInfo

_RUNS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSteps:
    """Steps in which every running request sampled its next token and no prompt was computed."""

    num_steps: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    context_tokens: int = 0  # of all requests, summed over the steps

    @property
    def mean_ms(self) -> float:
        return self.seconds / self.num_steps * 1e3 if self.num_steps else 0.0

    def bytes_read(self, info: ModelInfo) -> int:
        """The minimum that these steps had to read: all weights and the used KV cache."""
        kv = self.context_tokens * info.kv_bytes_per_token
        return self.num_steps * info.weight_bytes + kv

    def share_of_bandwidth(self, info: ModelInfo, bytes_per_s: float) -> float | None:
        """Bytes read per second as a share of the machine's; None if nothing was decoded."""
        if not self.num_steps or self.seconds <= 0:
            return None
        return self.bytes_read(info) / self.seconds / bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """The results of one run: all requests in order, and statistics of its decode steps."""

    traces: list[RequestTrace]
    duration_s: float
    decode: DecodeSteps


@dataclass(slots=True, kw_only=True)
class _Progress:
    """One request in flight."""

    request: BenchRequest
    sent_s: float
    token_times_s: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None
    finished: bool = False

    @property
    def is_decoding(self) -> bool:
        return bool(self.token_times_s) and not self.finished

    @property
    def context_len(self) -> int:
        return len(self.request.token_ids or ()) + len(self.token_times_s)

    def trace(self) -> RequestTrace:
        return RequestTrace(
            sent_s=self.sent_s,
            token_times_s=tuple(self.token_times_s),
            prompt_tokens=len(self.request.token_ids or ()),
            output_tokens=len(self.token_times_s),
            error=self.error,
        )


def run_offline(
    engine: Engine,
    requests: Sequence[BenchRequest],
    sampling: SamplingParams,
    on_finished: Callable[[], None] | None = None,
) -> OfflineRun:
    """Add all requests at once and step until the last one is done.

    `sampling` applies to every request, except for `max_tokens`, which is the request's own.
    """
    prefix = f"bench-{next(_RUNS)}-"
    under_way: dict[str, _Progress] = {}
    start_s = time.perf_counter()
    for index, request in enumerate(requests):
        assert request.token_ids is not None, "tokenize text before an offline run"
        name = f"{prefix}{index}"
        under_way[name] = _Progress(request=request, sent_s=time.perf_counter())
        engine.add(
            AddRequest(
                request_id=name,
                prompt_token_ids=request.token_ids,
                sampling=dataclasses.replace(sampling, max_tokens=request.output_len),
            )
        )
    steps = _drive(engine, under_way, on_finished)
    return OfflineRun(
        traces=[progress.trace() for progress in under_way.values()],
        duration_s=time.perf_counter() - start_s,
        decode=steps,
    )


def _drive(
    engine: Engine, under_way: dict[str, _Progress], on_finished: Callable[[], None] | None
) -> DecodeSteps:
    num_steps = num_tokens = context = 0
    seconds = 0.0
    num_left = len(under_way)
    while num_left:
        if not engine.has_work:
            raise LlmcError(f"the engine has no work left but {num_left} requests are unfinished")
        decoding = [p for p in under_way.values() if p.is_decoding]
        # A running request without a token is still in its prefill: not a pure decode step.
        is_decode = bool(decoding) and engine.stats().num_running == len(decoding)
        context_before = sum(p.context_len for p in decoding)
        began_s = time.perf_counter()
        updates = engine.step()
        now_s = time.perf_counter()
        new_tokens = 0
        for update in updates:
            progress = under_way[update.request_id]
            is_decode = is_decode and bool(progress.token_times_s)
            progress.token_times_s += [now_s] * len(update.new_token_ids)
            new_tokens += len(update.new_token_ids)
            progress.error = update.error or progress.error
            if update.finish_reason is not None and not progress.finished:
                progress.finished = True
                num_left -= 1
                if on_finished is not None:
                    on_finished()
        if is_decode and new_tokens == len(decoding):
            num_steps, num_tokens = num_steps + 1, num_tokens + new_tokens
            seconds, context = seconds + now_s - began_s, context + context_before
    return DecodeSteps(
        num_steps=num_steps, seconds=seconds, num_tokens=num_tokens, context_tokens=context
    )


def check_fits(requests: Sequence[BenchRequest], info: ModelInfo) -> None:
    """Reject a workload that exceeds the model's context or cache, before anything runs."""
    capacity = info.pool_tokens
    limit = min(info.max_model_len, capacity)
    for request in requests:
        num_in = len(request.token_ids or ())
        if num_in + request.output_len > limit:
            raise InvalidRequestError(
                f"a request of {num_in} prompt and {request.output_len} output tokens exceeds "
                f"the limit of {limit} tokens (context {info.max_model_len}, "
                f"KV cache {capacity}); lower the lengths, or raise --max-model-len or "
                "--kv-cache-memory"
            )


def usable_token_ids(info: ModelInfo) -> Sequence[int]:
    """Ids for random prompts: the whole vocabulary except end tokens."""
    return [t for t in range(info.vocab_size) if t not in info.eos_token_ids]


def bandwidth_result(
    decode: DecodeSteps, info: ModelInfo, bytes_per_s: float | None
) -> dict[str, Any]:
    """The roofline part of a JSON result; `bytes_per_s` is None if it was not measured."""
    result: dict[str, Any] = {
        "weight_bytes": info.weight_bytes,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "decode_steps": decode.num_steps,
        "mean_decode_step_ms": decode.mean_ms,
        "mean_decode_batch": decode.num_tokens / decode.num_steps if decode.num_steps else 0.0,
    }
    if bytes_per_s is not None:
        result["read_bandwidth_bytes_per_s"] = bytes_per_s
        result["decode_bandwidth_share"] = decode.share_of_bandwidth(info, bytes_per_s)
    return result


def speculation_result(before: EngineStats, after: EngineStats) -> dict[str, int]:
    """The draft-token part of a JSON result: the difference between two readings."""
    return {
        "num_drafts": after.num_drafts - before.num_drafts,
        "num_draft_tokens": after.num_draft_tokens - before.num_draft_tokens,
        "num_accepted_tokens": after.num_accepted_tokens - before.num_accepted_tokens,
    }
