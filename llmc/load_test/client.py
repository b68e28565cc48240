"""A timing client of the OpenAI API: one streamed request in, one RequestTrace out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from llmc.errors import ConfigError
from llmc.load_test.metrics import RequestTrace
from llmc.load_test.workloads import BenchRequest
from llmc.server_url import check_port, uses_proxies

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server, and the settings shared by all requests."""

    base_url: str
    backend: str = "openai"
    endpoint: str | None = None  # None: the backend's default
    model: str = ""
    api_key: str | None = None
    temperature: float | None = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in ENDPOINTS:
            raise ConfigError(
                f"unknown backend {self.backend!r}; choose one of {', '.join(ENDPOINTS)}"
            )
        check_port("--base-url", self.base_url)
        if urlsplit(self.base_url).scheme not in ("http", "https"):
            raise ConfigError(
                f"the base URL must start with http:// or https://, got {self.base_url!r}"
            )

    @property
    def path(self) -> str:
        path = self.endpoint or ENDPOINTS[self.backend]
        return path if path.startswith("/") else "/" + path


def open_client(target: Target) -> httpx.AsyncClient:
    """A client without a connection limit or a read timeout: the benchmark controls both."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    return httpx.AsyncClient(
        base_url=target.base_url.rstrip("/"),
        headers=headers,
        timeout=httpx.Timeout(None, connect=30.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=uses_proxies(target.base_url),
    )


def request_body(target: Target, request: BenchRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": request.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": request.text or ""}]
    else:
        body["prompt"] = request.text if request.token_ids is None else list(request.token_ids)
    if target.temperature is not None:
        body["temperature"] = target.temperature
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body | dict(target.extra_body)


async def send(client: httpx.AsyncClient, target: Target, request: BenchRequest) -> RequestTrace:
    """Send one request and time its chunks. A failure is a trace with `error`, not an exception."""
    body = request_body(target, request)
    answer = _Answer()
    sent_s = time.perf_counter()
    try:
        async with client.stream("POST", target.path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                answer.error = f"HTTP {response.status_code}: {_error_text(response)}"
            else:
                async for line in response.aiter_lines():
                    answer.read_line(line)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    times = tuple(answer.content_times_s) or tuple(answer.other_times_s[-1:])
    if answer.error is None and not times:
        answer.error = "the stream ended without a token"
    return RequestTrace(
        sent_s=sent_s,
        token_times_s=times,
        prompt_tokens=answer.prompt_tokens or request.prompt_len or 0,
        output_tokens=answer.output_tokens or len(times),
        text="".join(answer.text),
        error=answer.error,
    )


class _Answer:
    """The contents of one stream's events so far."""

    def __init__(self) -> None:
        self.content_times_s: list[float] = []
        self.other_times_s: list[float] = []  # chunks that carry a choice but no text
        self.text: list[str] = []
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.error: str | None = None

    def read_line(self, line: str) -> None:
        if not line.startswith("data:"):
            return  # an empty line, a comment that keeps the connection alive, an event name
        content = line.removeprefix("data:").strip()
        if content == "[DONE]":
            return
        now_s = time.perf_counter()
        try:
            event = json.loads(content)
        except json.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            self.error = f"the server sent an event that is not a JSON object: {content[:100]!r}"
            return
        if event.get("error"):
            self.error = f"error event: {json.dumps(event['error'])[:300]}"
        usage = event.get("usage")
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            text = _choice_text(choice)
            (self.content_times_s if text else self.other_times_s).append(now_s)
            self.text.append(text)


def _choice_text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _error_text(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text
    return " ".join(str(message).split())[:300]
