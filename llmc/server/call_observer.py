"""Observes one generation call: registers it as a running call and records its trace."""

from __future__ import annotations

import secrets

from starlette.types import Scope

from llmc.async_llm import Stream
from llmc.server.running_calls import RunningCalls
from llmc.server.tracing import CallSpan, Tracer


class CallObserver:
    """Created when work on a call starts; must be closed when the call ends."""

    def __init__(self, request_id: str, calls: RunningCalls, span: CallSpan | None) -> None:
        self._request_id = request_id
        self._calls = calls
        self._span = span
        self._stream: Stream | None = None

    @classmethod
    def of(cls, scope: Scope) -> CallObserver:
        state, request = scope["app"].state, scope["state"]
        tracer: Tracer | None = state.tracer
        span = None
        if tracer is not None:
            span = tracer.begin(scope["path"], request.get("model"), scope["headers"])
        return cls(request["request_id"], state.running_calls, span)

    def engine_id(self) -> str:
        """The HTTP request's id in the engine's log. Unique, which a client's id may not be."""
        return f"{self._request_id}-{secrets.token_hex(4)}"

    def begin(self, stream: Stream) -> None:
        self._stream = stream
        self._calls.add(self._request_id, stream)

    def close(self, error: BaseException | None) -> None:
        if self._stream is not None:
            self._calls.remove(self._request_id, self._stream)
        if self._span is not None:
            self._span.end(self._request_id, self._stream, error)
