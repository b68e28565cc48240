"""Lines of a batch -> responses of the routes themselves, called inside the process.

    {"custom_id", "method", "url", "body"}  ->  route  ->  {"custom_id", "response" or "error"}

A batch must leave room for interactive callers: only some of its requests run at a time, none
starts while the engine's queue is not empty, and with priority scheduling they come last.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.types import Message, Scope

from llmc.async_llm import AsyncLLM
from llmc.errors import EngineDeadError
from llmc.server.body import parse_object
from llmc.server.errors import ApiError, as_api_error, dump_json, error_body

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
_WITH_PRIORITY = 2**31  # larger numbers are scheduled later
_RETRY_S = 0.25
_BUSY = (429, 503)  # these describe the server's state; the request is retried


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: str = Field(min_length=1, max_length=512)
    method: str = "POST"
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of a batch; `number` counts lines from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result."""

    custom_id: str
    is_error: bool
    text: bytes  # a line of JSON, newline included


def parse_line(number: int, raw: bytes, urls: Iterable[str] = URLS) -> BatchLine:
    """Parse one line. If it is invalid, raises ApiError, whose `param` names its field."""
    try:
        line = _Line.model_validate(parse_object(raw))
    except (ApiError, ValidationError) as exc:
        error = as_api_error(exc)
        raise ApiError(
            400, f"line {number}: {error.message}", param=error.param, code=error.code
        ) from None
    if line.method != "POST":
        raise ApiError(400, f"line {number}: method must be POST", param="method")
    if line.url not in urls:
        raise ApiError(
            400,
            f"line {number}: url {line.url!r:.200} is not one of {', '.join(urls)}",
            param="url",
        )
    if line.body.get("stream"):
        raise ApiError(400, f"line {number}: a batch can't stream", param="body.stream")
    return BatchLine(number=number, custom_id=line.custom_id, url=line.url, body=line.body)


def error_row(custom_id: str, error: ApiError) -> Row:
    """The row of a request that was not run."""
    shown = error_body(error)["error"]
    value = {
        "id": _row_id(),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": shown["code"], "message": shown["message"]},
    }
    return Row(custom_id=custom_id, is_error=True, text=dump_json(value) + b"\n")


def _row_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


class BatchCaller:
    """Runs requests of one batch. `state` is what the Guard records about a caller (its key)."""

    def __init__(self, app: Starlette, state: Mapping[str, Any], *, at_once: int) -> None:
        self._app = app
        self._llm: AsyncLLM = app.state.llm
        self._state = dict(state)
        self._at_once = at_once

    async def run(self, lines: Iterator[BatchLine], on_row: Callable[[Row], None]) -> None:
        """Run the lines; rows come in completion order. Raises EngineDeadError when the server
        shuts down or its engine is dead; lines without a row must then be run again. Can be
        cancelled."""
        workers = [asyncio.create_task(self._work(lines, on_row)) for _ in range(self._at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    async def _work(self, lines: Iterator[BatchLine], on_row: Callable[[Row], None]) -> None:
        for line in lines:  # one iterator for all workers
            on_row(await self._row(line))

    async def _row(self, line: BatchLine) -> Row:
        while True:
            await self._wait_for_room()
            request_id = uuid.uuid4().hex
            status, body = await self._call(line, request_id)
            if status not in _BUSY:
                break
            await asyncio.sleep(_RETRY_S)
        response = {"status_code": status, "request_id": request_id}
        text = (
            b'{"id":'
            + dump_json(_row_id())
            + b',"custom_id":'
            + dump_json(line.custom_id)
            + b',"response":'
            + dump_json(response)[:-1]
            + b',"body":'
            + body
            + b'},"error":null}\n'
        )
        return Row(custom_id=line.custom_id, is_error=status != 200, text=text)

    async def _wait_for_room(self) -> None:
        while not self._llm.is_alive or self._llm.stats().num_waiting:
            self._check()
            await asyncio.sleep(_RETRY_S if not self._llm.is_alive else 0.01)
        self._check()

    def _check(self) -> None:
        if self._llm.is_draining or self._llm.failure is not None:
            raise EngineDeadError(self._llm.failure or "the server is shutting down")

    async def _call(self, line: BatchLine, request_id: str) -> tuple[int, bytes]:
        """Call a route; returns (status, JSON)."""
        given = line.body
        if self._llm.config.scheduling_policy == "priority":
            given = {"priority": _WITH_PRIORITY, **given}
        sent = [{"type": "http.request", "body": dump_json(given), "more_body": False}]
        got: list[Message] = []

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()  # there is no client that could disconnect
            raise AssertionError("unreachable")

        async def send(message: Message) -> None:
            got.append(message)

        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.url,
            "raw_path": line.url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "app": self._app,
            "state": {**self._state, "request_id": request_id},
        }
        try:
            await self._app.router(scope, receive, send)
        except Exception as exc:
            error = as_api_error(exc)
            return error.status, dump_json(error_body(error))
        body = b"".join(m.get("body", b"") for m in got if m["type"] == "http.response.body")
        return int(got[0]["status"]), body
