"""The same metrics under vLLM's names, for dashboards and autoscalers built for vLLM.

vLLM publishes its Grafana dashboards in examples/observability of its repository; NAMES lists those
of its metrics that llmc has. HTTP metrics have no prefix there; the others get the label `engine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

NAMES = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("kv_cache_usage_perc", "cache_config_info", "num_preemptions", "iteration_tokens_total"),
    *("prompt_tokens", "prompt_tokens_cached", "prompt_tokens_by_source", "generation_tokens"),
    *("prefix_cache_queries", "prefix_cache_hits", "request_success", "admission_rejections"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
    *("spec_decode_num_accepted_tokens", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
    *("request_num_preemptions", "request_prefill_kv_computed_tokens"),
)
UNPREFIXED = ("http_requests", "http_request_duration_seconds")
ENGINE = "0"


class Shown(Protocol):
    """A source of metrics, such as a CollectorRegistry."""

    def collect(self) -> Iterable[Metric]: ...


def vllm_registry(shown: Shown) -> CollectorRegistry:
    """The metrics of `shown`, renamed, and the metrics of this process."""
    registry = CollectorRegistry()
    registry.register(_Renamed(shown))
    ProcessCollector(registry=registry)
    return registry


class _Renamed:
    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._names = {f"llmc:{name}": f"vllm:{name}" for name in NAMES}
        self._names |= {f"llmc:{name}": name for name in UNPREFIXED}

    def collect(self) -> Iterator[Metric]:
        for family in self._shown.collect():
            name = self._names.get(family.name)
            if name is not None:
                yield _renamed(family, name)


def _renamed(family: Metric, name: str) -> Metric:
    labels = {"engine": ENGINE} if name.startswith("vllm:") else {}
    other = Metric(name, family.documentation, family.type)
    other.samples = [
        sample._replace(
            name=name + sample.name.removeprefix(family.name), labels={**sample.labels, **labels}
        )
        for sample in family.samples
    ]
    return other
