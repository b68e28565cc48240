"""What /metrics says: of one request, of HTTP, and under the names that dashboards ask for."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, live_server
from prometheus_client.parser import text_string_to_metric_families

from llmc.server.settings import ServerSettings

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# What vLLM's dashboards "vLLM" and "vLLM / Overview" query (examples/observability of its
# repository, 2026), but for caches of images and of other servers, which there is none of here.
VLLM = _names(
    """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_count
vllm:e2e_request_latency_seconds_sum vllm:generation_tokens_total
vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_count
vllm:inter_token_latency_seconds_sum vllm:iteration_tokens_total_bucket
vllm:iteration_tokens_total_count vllm:iteration_tokens_total_sum vllm:kv_cache_usage_perc
vllm:num_preemptions_total vllm:num_requests_running vllm:num_requests_waiting
vllm:num_requests_waiting_by_reason vllm:prefix_cache_hits_total vllm:prefix_cache_queries_total
vllm:prompt_tokens_by_source_total vllm:prompt_tokens_total
vllm:request_decode_time_seconds_count vllm:request_decode_time_seconds_sum
vllm:request_generation_tokens_bucket vllm:request_generation_tokens_count
vllm:request_generation_tokens_sum vllm:request_max_num_generation_tokens_sum
vllm:request_prefill_time_seconds_count vllm:request_prefill_time_seconds_sum
vllm:request_prompt_tokens_bucket vllm:request_prompt_tokens_count
vllm:request_prompt_tokens_sum vllm:request_queue_time_seconds_bucket
vllm:request_queue_time_seconds_count vllm:request_queue_time_seconds_sum
vllm:request_success_total vllm:request_time_per_output_token_seconds_bucket
vllm:request_time_per_output_token_seconds_count vllm:request_time_per_output_token_seconds_sum
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_count
vllm:time_to_first_token_seconds_sum http_requests_total http_request_duration_seconds_sum
http_request_duration_seconds_count
"""
)
# "vLLM / Instances", "vLLM / KV Cache" and "vLLM / Speculative Decoding" ask for these too.
VLLM_MORE = _names(
    """
vllm:cache_config_info vllm:prompt_tokens_cached_total vllm:spec_decode_num_drafts_total
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
process_cpu_seconds_total process_resident_memory_bytes process_start_time_seconds
process_open_fds process_max_fds
"""
)


@pytest.fixture(scope="module")
def both() -> Iterator[Live]:
    """A server whose metrics have vLLM's names too."""
    with live_server(ServerSettings(vllm_metrics=True)) as live:
        yield live


def samples(live: Live) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(live.client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def value(found: dict[str, list[Any]], name: str, **labels: str) -> float:
    return sum(s.value for s in found[name] if labels.items() <= s.labels.items())


def test_one_request_is_in_every_histogram(both: Live) -> None:
    before = samples(both)
    usage = both.complete(n=2, prompt="count this").json()["usage"]
    both.wait_idle()
    after = samples(both)

    def new(name: str, **labels: str) -> float:
        return value(after, f"llmc:{name}", **labels) - value(before, f"llmc:{name}", **labels)

    for name in (
        *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_params_n"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_num_preemptions"),
        *("request_decode_time_seconds", "request_inference_time_seconds", "request_cached_tokens"),
        *("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"),
        *("request_max_num_generation_tokens", "request_prefill_kv_computed_tokens"),
        "request_time_per_output_token_seconds",
    ):
        assert new(f"{name}_count") == 1, name
    phases = [new(f"request_{phase}_time_seconds_sum") for phase in ("queue", "prefill", "decode")]
    assert sum(phases) == pytest.approx(new("e2e_request_latency_seconds_sum"))
    assert new("request_params_n_sum") == 2
    assert new("request_generation_tokens_sum") == usage["completion_tokens"]
    longest = new("request_max_num_generation_tokens_sum")
    assert 2 * longest == usage["completion_tokens"]
    sources = ("local_compute", "local_cache_hit")
    by_source = [new("prompt_tokens_by_source_total", source=name) for name in sources]
    assert sum(by_source) == new("prompt_tokens_total") == 2 * usage["prompt_tokens"]
    assert min(by_source) > 0, "the second completion shares the first one's prompt"
    assert new("iteration_tokens_total_count") == new("engine_steps_total") > 0
    assert new("iteration_tokens_total_sum") >= usage["completion_tokens"]


def test_steps_without_a_cuda_graph_have_reasons(both: Live) -> None:
    counts = {"not_captured": 5, "images": 4, "long_prompts": 3, "too_large": 2}
    both.scripted.runner.eager_steps = counts
    assert both.complete().status_code == 200
    both.wait_idle()
    found = samples(both)["llmc:eager_steps_total"]
    assert {sample.labels["reason"]: sample.value for sample in found} == counts


def test_answers_are_counted_by_route(both: Live) -> None:
    before = samples(both)
    for path in ("/nothing/1", "/nothing/2", "/v1/models/none", "/health", "/metrics"):
        both.client.get(path)
    both.complete()
    found: dict[tuple[str, ...], float] = {}
    deadline = time.monotonic() + 10
    while not found.get(("POST", "/v1/completions", "2xx")) and time.monotonic() < deadline:
        for sample in samples(both)["http_requests_total"]:  # counted once the answer is sent
            labels = sample.labels
            key = labels["method"], labels["handler"], labels["status"]
            old = value(before, sample.name, **labels) if sample.name in before else 0
            found[key] = sample.value - old
    assert found["GET", "none", "4xx"] == 2
    assert found["GET", "/v1/models/{name:path}", "4xx"] == 1
    assert found["POST", "/v1/completions", "2xx"] == 1
    assert not any(handler in ("/health", "/metrics") for _, handler, _ in found)


def test_clients_cannot_add_metrics_by_inventing_methods(both: Live) -> None:
    answers = [both.client.request(name, "/v1/models") for name in ("BREW", "X1", "X2", "X3")]
    assert {answer.status_code for answer in answers} == {405}
    wanted = {"method": "other", "handler": "/v1/models", "status": "4xx"}
    deadline = time.monotonic() + 10
    while True:
        found = samples(both)["http_requests_total"]  # counted once the answer is sent
        if any(s.labels == wanted and s.value == 4 for s in found) or time.monotonic() > deadline:
            break
    assert [s.value for s in found if s.labels == wanted] == [4]
    assert not {s.labels["method"] for s in found} & {"BREW", "X1", "X2", "X3"}


def test_vllms_dashboards_find_their_metrics(both: Live) -> None:
    both.complete()
    found = samples(both)
    assert not [name for name in (*VLLM, *VLLM_MORE) if name not in found]
    labels = found["vllm:num_requests_running"][0].labels
    assert labels == {"model_name": "scripted", "engine": "0"}
    reasons = {s.labels["reason"] for s in found["vllm:num_requests_waiting_by_reason"]}
    assert reasons == {"capacity", "deferred"}
    bounds = {s.labels["le"] for s in found["vllm:time_to_first_token_seconds_bucket"]}
    assert {"0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"} <= bounds  # its SLO choices
    for name in VLLM:
        ours = name.replace("vllm:", "llmc:") if ":" in name else f"llmc:{name}"
        assert [s.value for s in found[name]] == [s.value for s in found[ours]], name


def test_vllms_names_are_asked_for(live: Live) -> None:
    assert "vllm:" not in live.client.get("/metrics").text


def load_maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_dashboard", GRAFANA / "make_dashboard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_asks_for_metrics_that_are_there(both: Live) -> None:
    made = load_maker().dashboard()
    assert json.loads((GRAFANA / "llmc.json").read_text("utf-8")) == made, "run make_dashboard.py"
    shown = [panel for panel in made["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in shown for target in panel["targets"]]
    queries += [v["definition"] for v in made["templating"]["list"] if v["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"llmc:\w+", query)}
    both.complete()
    text = both.client.get("/metrics").text
    # a counter by reason has no sample before the first one
    there = set(samples(both)) | set(re.findall(r"# TYPE (\S+) counter", text))
    assert len(asked) > 30 and not asked - there
    for query in queries:  # brackets close, and every selector has the dashboard's variables
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_the_dashboard_is_well_formed() -> None:
    made = load_maker().dashboard()
    ids = [panel["id"] for panel in made["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered, f"{panel['title']} lies on another panel"
        cells |= covered
        if panel["type"] != "row":
            refs = [target["refId"] for target in panel["targets"]]
            assert refs and len(set(refs)) == len(refs)
            assert panel["datasource"]["uid"] == "${datasource}"
    names = {variable["name"] for variable in made["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(made))) - names == {"__rate_interval", "__all"}
