"""Prometheus metrics under `llmc:`, with the suffixes that vLLM uses.

Gauges and token counters are read from the engine's statistics on each scrape; latencies are
measured here, where the tokens leave. With several API processes latencies are summed over all of
them, through files in the folder PROMETHEUS_MULTIPROC_DIR.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from llmc.async_llm import AsyncLLM, Stream
from llmc.frontend.completion import CompletionDelta

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
LABELS = ("model_name",)
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # read by prometheus_client when it is imported


class Metrics:
    """All metrics of one server, in a separate registry."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        engine = _EngineCollector(llm, model_name)
        self.first_token = self._histogram("time_to_first_token_seconds", FIRST_TOKEN_S)
        self.inter_token = self._histogram("inter_token_latency_seconds", TOKEN_S)
        self.per_token = self._histogram("request_time_per_output_token_seconds", TOKEN_S)
        self.end_to_end = self._histogram("e2e_request_latency_seconds", REQUEST_S)
        self.prompt_tokens = self._histogram("request_prompt_tokens", TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", TOKENS)
        self._finished = Counter(
            "llmc:request_success",
            "Completions that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._rejected = Counter(
            "llmc:admission_rejections",
            "Calls that were refused, by reason.",
            (*LABELS, "reason"),
            registry=self._registry,
        )

        self._shown = self._registry
        if MULTIPROCESS in os.environ:
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown)  # type: ignore[no-untyped-call]
        self._shown.register(engine)

    def render(self) -> bytes:
        return generate_latest(self._shown)

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


class Watch:
    """Times the tokens of one call as they are sent."""

    def __init__(self, metrics: Metrics, stream: Stream) -> None:
        self._metrics = metrics
        self._stream = stream
        self._last: dict[tuple[int, int], float] = {}

    def saw(self, deltas: Sequence[tuple[int, CompletionDelta]]) -> None:
        now = time.monotonic()
        for index, delta in deltas:
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
            if request.first_token is None:
                continue
            self._metrics.first_token.observe(request.first_token - request.submitted)
            if request.ended is None:
                self._metrics.finished("abort")
                continue
            count = request.num_output_tokens
            self._metrics.end_to_end.observe(request.ended - request.submitted)
            self._metrics.prompt_tokens.observe(len(request.source.prompt_token_ids))
            self._metrics.generation_tokens.observe(count)
            if count > 1:
                each = (request.ended - request.first_token) / (count - 1)
                self._metrics.per_token.observe(each)


class _EngineCollector:
    """The engine's statistics as metrics, read on each scrape."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats()
        used = 1 - stats.num_free_blocks / max(1, stats.num_blocks)
        yield self._gauge("num_requests_running", stats.num_running)
        yield self._gauge("num_requests_waiting", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", used)
        yield self._counter("num_preemptions", stats.num_preemptions)
        yield self._counter("prompt_tokens", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", stats.num_generated_tokens)
        yield self._counter("engine_steps", stats.num_steps)
        yield self._counter("failed_engine_steps", stats.num_failed_steps)
        yield self._counter("wasted_row_steps", stats.num_wasted_row_steps)
        yield self._counter("num_swaps", stats.num_swaps)
        yield self._counter("runtime_compiles", stats.num_runtime_compiles)
        yield self._counter("prefix_cache_queries", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", stats.prefix_cache_hits)
        yield self._counter("spec_decode_num_drafts", stats.num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", stats.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", stats.num_accepted_tokens)
        yield self._gauge("engine_up", self._llm.is_alive)
        yield from self._processes()

    def _processes(self) -> Iterator[Metric]:
        """The processes of the server, `engine` and `api-0` and so on; a dead one is a 0."""
        known = self._llm.processes()
        up, memory = (
            GaugeMetricFamily(f"llmc:{name}", _help(name), labels=(*LABELS, "process"))
            for name in ("process_up", "process_resident_memory_bytes")
        )
        restarts, seconds = (
            CounterMetricFamily(f"llmc:{name}", _help(name), labels=(*LABELS, "process"))
            for name in ("process_restarts", "process_cpu_seconds")
        )
        for name in sorted({*known.pids, *known.restarts}):
            labels = [*self._labels, name]
            used = _usage(known.pids.get(name))
            up.add_metric(labels, used is not None)
            restarts.add_metric(labels, known.restarts.get(name, 0))
            if used is not None:
                memory.add_metric(labels, used[0])
                seconds.add_metric(labels, used[1])
        yield from (up, restarts, memory, seconds)

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"llmc:{name}", _help(name), labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, value: float) -> Metric:
        family = CounterMetricFamily(f"llmc:{name}", _help(name), labels=LABELS)
        family.add_metric(self._labels, value)
        return family


def _usage(pid: int | None) -> tuple[int, float] | None:
    """(resident bytes, seconds of CPU) of a process; None when it is not there."""
    try:
        process = psutil.Process(pid) if pid is not None else None
        if process is None:
            return None
        times = process.cpu_times()
        return process.memory_info().rss, times.user + times.system
    except psutil.Error:
        return None


def _help(name: str) -> str:
    return name.replace("_", " ").capitalize() + "."
