"""The operator's routes: load, settings, profiles, the prefix cache, and calls to abort.

The Guard lets them pass with the key of --admin-api-key alone (server/guard.py).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

import llmc
from llmc.async_llm import AsyncLLM
from llmc.errors import InvalidRequestError
from llmc.server.body import read_body
from llmc.server.errors import ApiError, json_response
from llmc.server.running_calls import RunningCalls
from llmc.server.settings import ServerSettings

_SECRETS = ("api_keys", "admin_api_key")


class AbortBody(BaseModel):
    """Calls by their `x-request-id`, or all that run."""

    model_config = ConfigDict(extra="forbid")

    request_ids: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    all: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> AbortBody:
        if (self.request_ids is None) != self.all:
            raise ApiError(400, "send either request_ids or all=true", param="request_ids")
        return self


async def load(request: Request) -> Response:
    """How much there is to do: calls of this process, requests of the engine."""
    llm: AsyncLLM = request.app.state.llm
    stats = llm.stats()
    return json_response(
        {
            "server_load": llm.num_active,
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage": 1 - stats.num_free_blocks / max(1, stats.num_blocks),
        }
    )


async def server_info(request: Request) -> Response:
    """What runs: version, model, engine options and server settings; no keys."""
    state = request.app.state
    settings = public_settings(state.settings)
    return json_response({"version": llmc.__version__, **describe(state.llm), "server": settings})


def describe(llm: AsyncLLM) -> dict[str, Any]:
    """What runs for one model."""
    return {
        "model": _plain(dataclasses.asdict(llm.info)),
        "engine": _plain(dataclasses.asdict(llm.config)),
        "processes": dict(llm.processes().pids),
    }


def public_settings(settings: ServerSettings) -> Any:
    given = dataclasses.asdict(settings)
    return _plain({name: value for name, value in given.items() if name not in _SECRETS})


async def start_profile(request: Request) -> Response:
    """Record what the engine's steps do, until /stop_profile."""
    return await _operated(request, "start_profile")


async def stop_profile(request: Request) -> Response:
    """Write the record to a file of the server, whose path is the answer."""
    return await _operated(request, "stop_profile")


async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes. Requests that run keep their blocks."""
    return await _operated(request, "reset_prefix_cache")


async def _operated(request: Request, operation: Any) -> Response:
    state = request.app.state
    return json_response({"message": await operated(state.llm, operation, state.settings)})


async def operated(llm: AsyncLLM, operation: Any, settings: ServerSettings) -> str:
    try:
        return await llm.operate(operation, settings.profile_dir)
    except InvalidRequestError as exc:  # a profile is recorded already, or none is
        raise ApiError(409, str(exc)) from exc


async def abort_requests(request: Request) -> Response:
    """End calls; their clients get what there is, with finish_reason "abort"."""
    body = await read_body(request, AbortBody)
    if request.app.state.settings.api_workers > 1:
        raise ApiError(
            400, "with several API processes (--api-workers) none knows the calls of the others"
        )
    return json_response({"aborted": abort_calls(request.app.state, body)})


def abort_calls(state: Any, body: AbortBody) -> list[str]:
    """Of the calls that run in an application, those that were ended. `state` is its."""
    calls: RunningCalls = state.running_calls
    wanted = calls.ids if body.all else body.request_ids or ()
    aborted = [one for one in wanted if one in calls]
    for request_id in aborted:
        calls.abort(request_id, state.llm)
    return aborted


def _plain(value: Any) -> Any:
    """As JSON: what has no form there is written as Python shows it."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
