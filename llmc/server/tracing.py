"""OpenTelemetry traces (extra `otel`): one span per generation call.

Attributes follow the semantic conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/). These do not cover the durations of a call's
phases, which are `gen_ai.latency.*` in seconds, with vLLM's names. A `traceparent` header
(https://www.w3.org/TR/trace-context/) makes the span part of the caller's trace. The text of
prompts and answers is not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llmc import __version__
from llmc.async_llm import Stream
from llmc.errors import InvalidRequestError
from llmc.server.errors import as_api_error, code_of
from llmc.server.metrics import phases

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

SERVICE = "llmc"
CLOSE_S = 3.0  # the exporter itself retries for longer
_TEXT_PATHS = ("/v1/completions", "/api/generate")
# Our phases -> vLLM's names.
_LATENCIES = {
    "queue": "time_in_queue",
    "prefill": "time_in_model_prefill",
    "decode": "time_in_model_decode",
    "ttft": "time_to_first_token",
    "e2e": "e2e",
}
_SAMPLING = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
}


class Tracer:
    """Creates the server's spans and passes them to `provider`'s exporters."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE, __version__)

    @classmethod
    def to(cls, endpoint: str) -> Tracer:
        """A tracer that sends spans in batches to a collector, by OTLP over HTTP (protobuf)."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        resource = Resource({"service.name": SERVICE}).merge(Resource.create())
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def begin(
        self, path: str, model: str | None, headers: Iterable[tuple[bytes, bytes]]
    ) -> CallSpan:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        operation = "text_completion" if path in _TEXT_PATHS else "chat"
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": SERVICE,
            "url.path": path,
        }
        if model is not None:
            attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = model
        span = self._tracer.start_span(
            f"{operation} {model}" if model is not None else operation,
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        return CallSpan(span)

    def close(self) -> None:
        """Send the remaining spans, for CLOSE_S at most: the collector may be gone."""
        thread = threading.Thread(target=self._provider.shutdown, name="llmc-spans", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


class CallSpan:
    """The span of one call."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, request_id: str, stream: Stream | None, error: BaseException | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        span.set_attribute("gen_ai.request.id", request_id)
        if stream is not None and stream.requests:
            span.set_attributes(_request_attributes(stream))
            span.set_attributes(_answer_attributes(stream))
        if error is None and stream is not None and stream.error is not None:
            error = InvalidRequestError(stream.error)
        if isinstance(error, Exception):
            api_error = as_api_error(error, logs=False)  # the response to the client does
            span.set_attribute("error.type", code_of(api_error))
            span.set_status(Status(StatusCode.ERROR, api_error.shown))
        span.end()


def _request_attributes(stream: Stream) -> dict[str, Any]:
    sampling = stream.requests[0].source.sampling
    found = {
        f"gen_ai.request.{name}": getattr(sampling, field) for field, name in _SAMPLING.items()
    }
    if sampling.n != 1:
        found["gen_ai.request.choice.count"] = sampling.n
    stop = sampling.stop
    if stop:
        found["gen_ai.request.stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    return {name: value for name, value in found.items() if value is not None}


def _answer_attributes(stream: Stream) -> dict[str, Any]:
    requests = stream.requests
    reasons = [one.finish_reason or "abort" for r in requests for one in r.completions]
    found: dict[str, Any] = {
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": sum(len(r.source.prompt_token_ids) for r in requests),
        "gen_ai.usage.output_tokens": sum(r.num_output_tokens for r in requests),
        "gen_ai.usage.cache_read.input_tokens": sum(r.num_cached_tokens for r in requests),
    }
    started = [phases(r) for r in requests if r.first_token is not None]
    for phase, name in _LATENCIES.items() if started else ():
        found[f"gen_ai.latency.{name}"] = max(times[phase] for times in started)
    return found
