"""Computes the metrics of a benchmark: times of single requests -> throughput and percentiles.

    TTFT   first token (or chunk) - sent
    E2EL   last token - sent
    TPOT   (E2EL - TTFT) / (output tokens - 1), for requests of at least two tokens
    ITL    gaps between successive tokens (over HTTP: chunks), of all requests together

Times here are seconds of one monotonic clock; in results they are milliseconds. Result keys are
those of `vllm bench serve`, so that scripts can read both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.errors import ConfigError

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
DEFAULT_PERCENTILES = (90.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """The arrival times of one answer's parts. `error` is set if the request failed."""

    sent_s: float
    token_times_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def succeeded(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        return self.token_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        times = self.token_times_s
        return [after - before for before, after in zip(times, times[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Summary of one metric in milliseconds; all zero if nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    @classmethod
    def of_seconds(
        cls, seconds: Sequence[float], percentiles: Sequence[float] = DEFAULT_PERCENTILES
    ) -> Distribution:
        ms = np.asarray(seconds, dtype=np.float64) * 1e3
        if ms.size == 0:
            ms = np.zeros(1)
        return cls(
            mean=float(np.mean(ms)),
            median=float(np.median(ms)),
            std=float(np.std(ms)),
            percentiles={p: float(np.percentile(ms, p)) for p in percentiles},
        )

    def keys(self, metric: str) -> dict[str, float]:
        """`mean_ttft_ms`, `median_ttft_ms`, `std_ttft_ms`, `p99_ttft_ms`, ..."""
        values = {"mean": self.mean, "median": self.median, "std": self.std}
        values |= {f"p{p:g}": value for p, value in self.percentiles.items()}
        return {f"{name}_{metric}_ms": value for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchMetrics:
    """The metrics of a run over a set of requests."""

    completed: int
    failed: int
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    distributions: Mapping[str, Distribution]

    def as_json(self) -> dict[str, float | int | None]:
        """Flat, with vLLM's key names."""
        result: dict[str, float | int | None] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent_requests,
        }
        for metric, distribution in self.distributions.items():
            result |= distribution.keys(metric)
        return result


def samples_s(traces: Sequence[RequestTrace]) -> dict[str, list[float]]:
    """Every measured time of the requests that were answered, by the name of its metric."""
    done = _answered(traces)
    return {
        "ttft": [t.ttft_s for t in done],
        "tpot": [t.tpot_s for t in done if t.tpot_s is not None],
        "itl": [gap for t in done for gap in t.itls_s],
        "e2el": [t.e2el_s for t in done],
    }


def _answered(traces: Sequence[RequestTrace]) -> list[RequestTrace]:
    return [t for t in traces if t.succeeded and t.token_times_s]


def compute_metrics(
    traces: Sequence[RequestTrace],
    duration_s: float,
    *,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    goodput_ms: Mapping[str, float] | None = None,
) -> BenchMetrics:
    """Metrics of a run that took `duration_s`; failed requests only count as failed."""
    done = _answered(traces)
    output_tokens = sum(t.output_tokens for t in done)
    input_tokens = sum(t.prompt_tokens for t in done)
    good = None if not goodput_ms else sum(_is_good(t, goodput_ms) for t in done)
    return BenchMetrics(
        completed=len(done),
        failed=len(traces) - len(done),
        duration_s=duration_s,
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        request_throughput=len(done) / duration_s,
        request_goodput=None if good is None else good / duration_s,
        output_throughput=output_tokens / duration_s,
        total_token_throughput=(input_tokens + output_tokens) / duration_s,
        max_output_tokens_per_s=_peak_tokens(done, duration_s),
        max_concurrent_requests=_peak_requests(done),
        distributions={
            name: Distribution.of_seconds(values, percentiles)
            for name, values in samples_s(traces).items()
        },
    )


def _is_good(trace: RequestTrace, limits_ms: Mapping[str, float]) -> bool:
    """Whether every limit is met; a request of one token has no TPOT and meets any limit on it."""
    actual_s = {"ttft": trace.ttft_s, "tpot": trace.tpot_s or 0.0, "e2el": trace.e2el_s}
    return all(actual_s[name] * 1e3 <= limit for name, limit in limits_ms.items())


def _peak_tokens(traces: Sequence[RequestTrace], duration_s: float) -> float:
    """The highest token rate in any of the equal parts, at most a second long, that divide the run.

    It is never below the mean, because not all parts can be below it. A chunk can have several
    tokens.
    """
    if not traces:
        return 0.0
    start = min(t.sent_s for t in traces)
    parts = max(1, math.ceil(duration_s))
    width_s = duration_s / parts
    tokens = np.zeros(parts)
    for trace in traces:
        for time_s in trace.token_times_s:
            part = min(parts - 1, max(0, math.floor((time_s - start) / width_s)))
            tokens[part] += trace.output_tokens / len(trace.token_times_s)
    return float(tokens.max()) / width_s


def _peak_requests(traces: Sequence[RequestTrace]) -> int:
    """The highest number of requests in flight at any moment."""
    ends = [(t.token_times_s[-1], -1) for t in traces]
    events = sorted([*((t.sent_s, 1) for t in traces), *ends])  # at a tie, ends come first
    return max(itertools.accumulate((change for _, change in events), initial=0))


def parse_percentiles(text: str) -> list[float]:
    """`90,99` -> [90.0, 99.0]."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [-1.0]
    if not values or not all(0 <= value <= 100 for value in values):
        raise ConfigError(
            f"percentiles must be numbers from 0 to 100 such as 50,90,99, got {text!r}"
        )
    return values


def parse_metric_names(text: str) -> list[str]:
    """`ttft,tpot` -> ["ttft", "tpot"]."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ConfigError(f"unknown metrics {unknown}; choose from {', '.join(METRICS)}")
    return names


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """["ttft:200", "tpot:50,e2el:1000"] -> limits in milliseconds."""
    limits: dict[str, float] = {}
    for part in " ".join(items).replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limits[name] >= 0:
            raise ConfigError(
                f"goodput must be NAME:MILLISECONDS with NAME ttft, tpot or e2el, got {part!r}"
            )
    return limits
