"""Prometheus metrics under `llmc:`, with the suffixes that vLLM uses.

Gauges and token counters are read from the engine's statistics on each scrape; latencies are
measured here, where tokens are sent. With several API processes, latencies are summed over all of
them through files in the folder PROMETHEUS_MULTIPROC_DIR.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from http import HTTPMethod

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from llmc.async_llm import AsyncLLM, Stream
from llmc.frontend.completion import CompletionDelta
from llmc.frontend.outputs import ActiveRequest
from llmc.server.engine_metrics import LABELS, EngineCollector
from llmc.server.vllm_metrics import vllm_registry

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
    *(1920, 7680),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
FEW = (0, 1, 2, 5, 10, 20, 50, 100)
HTTP_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
REASONS = ("stop", "length", "abort", "error")
METHODS = frozenset(HTTPMethod)
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # read by prometheus_client when it is imported


class Metrics:
    """All metrics of one server, in a separate registry. `vllm_names`: also use vLLM's names."""

    def __init__(self, llm: AsyncLLM, model_name: str, *, vllm_names: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        made = self._histogram
        self.first_token = made("time_to_first_token_seconds", FIRST_TOKEN_S)
        self.inter_token = made("inter_token_latency_seconds", TOKEN_S)
        self.per_token = made("request_time_per_output_token_seconds", TOKEN_S)
        self.end_to_end = made("e2e_request_latency_seconds", REQUEST_S)
        self.queue = made("request_queue_time_seconds", REQUEST_S)
        self.prefill = made("request_prefill_time_seconds", REQUEST_S)
        self.decode = made("request_decode_time_seconds", REQUEST_S)
        self.inference = made("request_inference_time_seconds", REQUEST_S)
        self.prompt_tokens = made("request_prompt_tokens", TOKENS)
        self.cached_tokens = made("request_cached_tokens", (0, *TOKENS))
        self.computed_tokens = made("request_prefill_kv_computed_tokens", (0, *TOKENS))
        self.generation_tokens = made("request_generation_tokens", TOKENS)
        self.longest = made("request_max_num_generation_tokens", TOKENS)
        self.max_tokens = made("request_params_max_tokens", TOKENS)
        self.n = made("request_params_n", FEW[1:])
        self.preemptions = made("request_num_preemptions", FEW)
        self._finished = self._counter(
            "request_success", "Completions that ended, by reason.", (*LABELS, "finished_reason")
        )
        for reason in REASONS:
            self._finished.labels(model_name, reason)  # a rate needs the 0 before the first
        self._rejected = self._counter(
            "admission_rejections", "Calls that were rejected, by reason.", (*LABELS, "reason")
        )
        self._http = HttpMetrics(self._registry)
        self.answered = self._http.answered
        self.shown = self._registry
        if MULTIPROCESS in os.environ:
            self.shown = CollectorRegistry()
            MultiProcessCollector(self.shown)  # type: ignore[no-untyped-call]
        self.shown.register(EngineCollector(llm, model_name))
        self._vllm = vllm_registry(self.shown) if vllm_names else None

    def render(self) -> bytes:
        text = generate_latest(self.shown)
        return text if self._vllm is None else text + generate_latest(self._vllm)

    def finished(self, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(self._model_name, reason).inc()

    def watch(self, stream: Stream) -> Watch:
        return Watch(self, stream)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(
            f"llmc:{name}",
            name.replace("_", " ").capitalize() + ".",
            LABELS,
            registry=self._registry,
            buckets=buckets,
        )
        return metric.labels(self._model_name)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"llmc:{name}", text, labels, registry=self._registry)


class HttpMetrics:
    """HTTP responses by route, independent of the model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answered = Counter(
            "llmc:http_requests",
            "HTTP responses by path and status class.",
            ("method", "handler", "status"),
            registry=registry,
        )
        self._answer_s = Histogram(
            "llmc:http_request_duration_seconds",
            "Seconds to the end of a response, by path.",
            ("method", "handler"),
            registry=registry,
            buckets=HTTP_S,
        )

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Record a finished HTTP request. `handler` is a route's path, which bounds the labels.
        Methods of the client's own invention are counted together, for the same reason."""
        method = method if method in METHODS else "other"
        self._answered.labels(method, handler, f"{status // 100}xx").inc()
        self._answer_s.labels(method, handler).observe(seconds)


class Watch:
    """Times the tokens of one call as they are sent."""

    def __init__(self, metrics: Metrics, stream: Stream) -> None:
        self._metrics = metrics
        self._stream = stream
        self._last: dict[tuple[int, int], float] = {}
        self._begun: set[int] = set()  # requests whose first token was seen

    def saw(self, deltas: Sequence[tuple[int, CompletionDelta]]) -> None:
        now = time.monotonic()
        for index, delta in deltas:
            request = self._stream.requests[index]
            if index not in self._begun and request.first_token is not None:
                self._begun.add(index)
                self._metrics.first_token.observe(request.first_token - request.submitted)
            key = (index, delta.index)
            last = self._last.get(key)
            if last is not None and delta.token_ids:
                each = (now - last) / len(delta.token_ids)
                for _ in delta.token_ids:
                    self._metrics.inter_token.observe(each)
            if delta.token_ids:
                self._last[key] = now
            if delta.finish_reason is not None:
                self._metrics.finished(delta.finish_reason)

    def close(self) -> None:
        """The call is over: record its requests in the histograms."""
        for request in self._stream.requests:
            if request.ended is None:  # the caller has left
                for completion in request.completions:
                    if completion.finish_reason is None:
                        self._metrics.finished("abort")
            elif request.first_token is not None:
                self._record(request)

    def _record(self, request: ActiveRequest) -> None:
        metrics, sampling = self._metrics, request.source.sampling
        times = phases(request)
        num_prompt, num_output = len(request.source.prompt_token_ids), request.num_output_tokens
        metrics.end_to_end.observe(times["e2e"])
        metrics.queue.observe(times["queue"])
        metrics.prefill.observe(times["prefill"])
        metrics.decode.observe(times["decode"])
        metrics.inference.observe(times["prefill"] + times["decode"])
        metrics.prompt_tokens.observe(num_prompt)
        metrics.cached_tokens.observe(request.num_cached_tokens)
        metrics.computed_tokens.observe(num_prompt - request.num_cached_tokens)
        metrics.generation_tokens.observe(num_output)
        metrics.longest.observe(max(len(one.token_ids) for one in request.candidates))
        metrics.n.observe(sampling.n)
        metrics.preemptions.observe(request.num_preemptions)
        if sampling.max_tokens is not None:
            metrics.max_tokens.observe(sampling.max_tokens)
        if num_output > 1:
            metrics.per_token.observe(times["decode"] / (num_output - 1))


def phases(request: ActiveRequest) -> dict[str, float]:
    """Seconds of a request that has a first token: `queue`, `prefill`, `decode`, `ttft`, `e2e`.

    Queue time is the engine's: from a request's arrival there to its first step. Prefill lasts from
    then to the first token received here, and decode from that to the last one.
    """
    assert request.first_token is not None, "it has a first token"
    end = request.ended if request.ended is not None else time.monotonic()
    ttft = request.first_token - request.submitted
    queue = min(request.queue_s or 0.0, ttft)
    return {
        "queue": queue,
        "prefill": ttft - queue,
        "decode": end - request.first_token,
        "ttft": ttft,
        "e2e": end - request.submitted,
    }
