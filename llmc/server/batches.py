"""/v1/batches, OpenAI's batch API: many requests in one file, answered when there is capacity."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from llmc.server.batch_lines import URLS
from llmc.server.batch_runner import BatchRunner
from llmc.server.batch_store import Batch, new_batch
from llmc.server.body import read_body
from llmc.server.errors import ApiError, json_response
from llmc.server.files import LEAST_KEEP_S, MAX_KEEP_S, caller, store
from llmc.server.list_page import list_page
from llmc.server.protocol import Body

MAX_PAGE = 100
_TIMES = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired")
_Text = Annotated[str, Field(max_length=512)]


class ExpiresAfter(BaseModel):
    """How long a file is kept."""

    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_KEEP_S, le=MAX_KEEP_S)]


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, _Text], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


async def create_batch(request: Request) -> Response:
    batches = store(request)
    body = await read_body(request, BatchBody)
    if body.endpoint not in URLS:
        raise ApiError(
            400,
            f"endpoint {body.endpoint[:200]!r} is not one of {', '.join(URLS)}",
            param="endpoint",
        )
    owner = caller(request)
    stored = batches.file(body.input_file_id, owner, "input_file_id")
    if stored.purpose != "batch":
        raise ApiError(
            400, f"the purpose of {stored.id} is {stored.purpose}, not batch", param="input_file_id"
        )
    keep = body.output_expires_after
    made = new_batch(
        input_file_id=stored.id,
        endpoint=body.endpoint,
        metadata=body.metadata,
        caller=owner,
        keep_output_s=None if keep is None else keep.seconds,
    )
    await asyncio.to_thread(batches.add, made)
    _runner(request).wake()
    return json_response(described(made))


async def list_batches(request: Request) -> Response:
    runner = _runner(request)
    found = await asyncio.to_thread(store(request).batches, caller(request))
    shown = [described(runner.current(one)) for one in found]
    return json_response(list_page(request, shown, most=MAX_PAGE))


async def get_batch(request: Request) -> Response:
    return json_response(described(_batch(request)))


async def cancel_batch(request: Request) -> Response:
    return json_response(described(_runner(request).cancel(_batch(request))))


def _runner(request: Request) -> BatchRunner:
    store(request)
    found: BatchRunner = request.app.state.batch_runner
    return found


def _batch(request: Request) -> Batch:
    runner = _runner(request)
    return runner.current(store(request).batch(request.path_params["name"], caller(request)))


def described(batch: Batch) -> dict[str, Any]:
    errors = {"object": "list", "data": batch.errors} if batch.errors else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_ns // 10**9,
        "expires_at": batch.expires_s,
        **{f"{name}_at": batch.times.get(name) for name in _TIMES},
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
    }
