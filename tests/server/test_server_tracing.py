"""Spans of generation calls, as an exporter gets them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from live_server import Live, live_server
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from llmc.errors import ConfigError
from llmc.server import settings, tracing
from llmc.server.completions import CompletionCall
from llmc.server.tracing import Tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[Live, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with live_server() as live:
        live.server.config.app.state.tracer = Tracer(provider)  # type: ignore[union-attr]
        yield live, exporter


@pytest.fixture
def spans(traced: tuple[Live, InMemorySpanExporter]) -> tuple[Live, Any]:
    live, exporter = traced
    exporter.clear()

    def finished(count: int = 1) -> list[Any]:
        """A span ends after the answer's last byte was sent."""
        live.wait_idle()
        until = time.monotonic() + 10
        while len(exporter.get_finished_spans()) < count and time.monotonic() < until:
            time.sleep(0.01)
        return list(exporter.get_finished_spans())

    return live, finished


def test_a_span_follows_the_conventions(spans: tuple[Live, Any]) -> None:
    live, finished = spans
    body = {"messages": [{"role": "user", "content": "count"}], "temperature": 0.5, "seed": 3}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    usage = live.post("/v1/chat/completions", body, headers=headers).json()["usage"]
    [span] = finished()
    assert span.name == "chat scripted" and span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    found = dict(span.attributes)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "scripted"
    assert found["gen_ai.request.id"] == "mine"
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.seed"]) == (0.5, 3)
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    times = {name: found[f"gen_ai.latency.{name}"] for name in ("e2e", "time_to_first_token")}
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    assert sum(found[f"gen_ai.latency.{part}"] for part in parts) == pytest.approx(times["e2e"])
    assert 0 < times["time_to_first_token"] <= times["e2e"]
    assert span.status.status_code is StatusCode.UNSET
    assert "count" not in repr(found).replace("_count", "").replace("choice.count", "")


def test_one_span_a_call_streamed_or_not(spans: tuple[Live, Any]) -> None:
    live, finished = spans
    live.complete(prompt=["count", "x"], n=2)
    live.events("/v1/completions", {"prompt": "count", "max_tokens": 100})
    several, streamed = finished(2)
    assert several.name == streamed.name == "text_completion scripted"
    assert len(several.attributes["gen_ai.response.finish_reasons"]) == 4
    assert several.attributes["gen_ai.request.choice.count"] == 2
    assert several.parent is None


def test_a_call_that_fails_says_why(spans: tuple[Live, Any]) -> None:
    live, finished = spans
    live.scripted.runner.nan_word = "broken"
    assert live.complete(prompt="broken").status_code == 500
    [span] = finished()
    assert span.attributes["error.type"] == "engine_error"
    assert span.status.status_code is StatusCode.ERROR


def test_an_unexpected_error_is_logged_once(
    spans: tuple[Live, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live, finished = spans

    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(CompletionCall, "body", fail)
    assert live.complete().status_code == 500
    [span] = finished()
    assert span.attributes["error.type"] == "internal_error"
    assert [record.message for record in caplog.records if record.exc_info] == ["unexpected error"]


def test_without_the_packages_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "has_opentelemetry", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'llmc-engine\[otel\]'"):
        settings.ServerSettings(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(ConfigError, match="must be a URL"):
        settings.ServerSettings(otlp_traces_endpoint="localhost:4318")


def test_a_collector_that_is_gone_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)
    is_over, sent = threading.Event(), threading.Event()

    class Provider:
        def get_tracer(self, *_: str) -> None:
            """Nothing is traced."""

        def shutdown(self) -> None:
            is_over.wait(60)
            sent.set()

    Tracer(Provider()).close()  # type: ignore[arg-type]
    assert not sent.is_set()
    is_over.set()
    assert sent.wait(60)
