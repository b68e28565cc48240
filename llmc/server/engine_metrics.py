"""The engine's statistics as Prometheus metrics, read on each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

import psutil
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from llmc.async_llm import AsyncLLM
from llmc.engine.messages import STEP_SIZES, EngineStats

LABELS = ("model_name",)
# With several engines: values per engine, with the label `engine`, in addition to the sums.
ENGINE_GAUGES: Mapping[str, Callable[[EngineStats], float]] = {
    "engine_num_requests_running": lambda stats: stats.num_running,
    "engine_num_requests_waiting": lambda stats: stats.num_waiting,
    "engine_kv_cache_usage_perc": lambda s: 1 - s.num_free_blocks / max(1, s.num_blocks),
}
ENGINE_COUNTERS: Mapping[str, Callable[[EngineStats], float]] = {
    "engine_prompt_tokens": lambda stats: stats.num_prompt_tokens,
    "engine_generation_tokens": lambda stats: stats.num_generated_tokens,
    "engine_prefix_cache_queries": lambda stats: stats.prefix_cache_queries,
    "engine_prefix_cache_hits": lambda stats: stats.prefix_cache_hits,
}


class EngineCollector:
    """A prometheus_client collector."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats()
        used = 1 - stats.num_free_blocks / max(1, stats.num_blocks)
        yield self._gauge("num_requests_running", stats.num_running)
        yield self._gauge("num_requests_waiting", stats.num_waiting)
        yield self._by_label(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "reason",
            {
                "capacity": stats.num_waiting - stats.num_deferred,
                "deferred": stats.num_deferred,
            },
        )
        yield self._gauge("kv_cache_usage_perc", used)
        yield self._counter("num_preemptions", stats.num_preemptions)
        yield self._counter("prompt_tokens", stats.num_prompt_tokens)
        yield self._counter("prompt_tokens_cached", stats.num_cached_prompt_tokens)
        yield self._by_label(
            CounterMetricFamily,
            "prompt_tokens_by_source",
            "source",
            {
                "local_compute": stats.num_prompt_tokens - stats.num_cached_prompt_tokens,
                "local_cache_hit": stats.num_cached_prompt_tokens,
            },
        )
        yield self._counter("generation_tokens", stats.num_generated_tokens)
        yield self._counter("engine_steps", stats.num_steps)
        yield self._step_sizes(stats)
        yield self._counter("failed_engine_steps", stats.num_failed_steps)
        yield self._counter("wasted_row_steps", stats.num_wasted_row_steps)
        yield self._counter("num_swaps", stats.num_swaps)
        yield self._counter("runtime_compiles", stats.num_runtime_compiles)
        eager = stats.eager_steps
        yield self._by_label(CounterMetricFamily, "eager_steps", "reason", eager)
        yield self._counter("prefix_cache_queries", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", stats.prefix_cache_hits)
        yield self._counter("spec_decode_num_drafts", stats.num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", stats.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", stats.num_accepted_tokens)
        yield self._gauge("engine_up", self._llm.is_alive)
        yield self._cache_config(stats)
        yield from self._processes()
        yield from self._each_engine()

    def _step_sizes(self, stats: EngineStats) -> Metric:
        name = "iteration_tokens_total"  # vLLM's name: tokens per step, over all its requests
        family = HistogramMetricFamily(f"llmc:{name}", "Tokens per step.", labels=LABELS)
        bounds = [*map(float, STEP_SIZES), float("inf")]
        counts = accumulate(stats.step_sizes or [0] * len(bounds))
        buckets = [
            ("+Inf" if bound == float("inf") else str(bound), count)
            for bound, count in zip(bounds, counts, strict=True)
        ]
        family.add_metric(self._labels, buckets, stats.num_step_tokens)
        return family

    def _cache_config(self, stats: EngineStats) -> Metric:
        """An info metric: always 1, with the information in its labels."""
        info, config = self._llm.info, self._llm.config
        labels = {
            "block_size": info.block_size,
            "num_gpu_blocks": stats.num_blocks,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        name = "cache_config_info"
        family = GaugeMetricFamily(f"llmc:{name}", _help(name), labels=(*LABELS, *labels))
        family.add_metric([*self._labels, *map(str, labels.values())], 1)
        return family

    def _processes(self) -> Iterator[Metric]:
        """The server's processes (`engine`, `api-0`, ...); `process_up` is 0 for a dead one."""
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

    def _each_engine(self) -> Iterator[Metric]:
        """With several engines, some of the sums above broken down by engine."""
        engines = self._llm.processes().engines
        if not engines:
            return
        for name, read in ENGINE_GAUGES.items():
            values = {one: read(stats) for one, stats in engines.items() if stats is not None}
            yield self._by_label(GaugeMetricFamily, name, "engine", values)
        for name, read in ENGINE_COUNTERS.items():
            values = {one: read(stats) for one, stats in engines.items() if stats is not None}
            yield self._by_label(CounterMetricFamily, name, "engine", values)

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"llmc:{name}", _help(name), labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, value: float) -> Metric:
        family = CounterMetricFamily(f"llmc:{name}", _help(name), labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _by_label(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(f"llmc:{name}", _help(name), labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric([*self._labels, key], value)
        return family


def _usage(pid: int | None) -> tuple[int, float] | None:
    """(resident bytes, CPU seconds) of a process; None if it does not exist."""
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
