"""The operator's routes: load, settings, profiles, the prefix cache, and aborting calls.

The Guard admits them only with the key of --admin-api-key (server/guard.py).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from llmc import __version__
from llmc.async_llm import AsyncLLM
from llmc.errors import InvalidRequestError
from llmc.server.body import read_body
from llmc.server.errors import ApiError, json_response
from llmc.server.running_calls import RunningCalls
from llmc.server.settings import ServerSettings

_SECRETS = ("api_keys", "admin_api_key")


class AbortBody(BaseModel):
    """Which calls to abort: by their `x-request-id`, or all that are running."""

    model_config = ConfigDict(extra="forbid")

    request_ids: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    all: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> AbortBody:
        if (self.request_ids is None) != self.all:
            raise ApiError(400, "send either request_ids or all=true", param="request_ids")
        return self


async def load(request: Request) -> Response:
    """The current load: calls of this process, requests of the engine."""
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
    """What is running: version, model, engine options and server settings; no keys."""
    state = request.app.state
    settings = public_settings(state.settings)
    return json_response({"version": __version__, **describe(state.llm), "server": settings})


def describe(llm: AsyncLLM) -> dict[str, Any]:
    """One model: its description, engine options and processes."""
    return {
        "model": _plain(dataclasses.asdict(llm.info)),
        "engine": _plain(dataclasses.asdict(llm.config)),
        "processes": dict(llm.processes().pids),
    }


def public_settings(settings: ServerSettings) -> Any:
    given = dataclasses.asdict(settings)
    return _plain({name: value for name, value in given.items() if name not in _SECRETS})


async def start_profile(request: Request) -> Response:
    """Profile the engine's steps until /stop_profile."""
    return await _on_operation_result(request, "start_profile")


async def stop_profile(request: Request) -> Response:
    """Write the profile to a file on the server and return its path."""
    return await _on_operation_result(request, "stop_profile")


async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix cache. Running requests keep their blocks."""
    return await _on_operation_result(request, "reset_prefix_cache")


async def _on_operation_result(request: Request, operation: Any) -> Response:
    state = request.app.state
    return json_response({"message": await operated(state.llm, operation, state.settings)})


async def operated(llm: AsyncLLM, operation: Any, settings: ServerSettings) -> str:
    try:
        return await llm.run_operation(operation, settings.profile_dir)
    except InvalidRequestError as exc:  # a profile is already being recorded, or none is
        raise ApiError(409, str(exc)) from exc


async def abort_requests(request: Request) -> Response:
    """Abort calls. Their clients get the output so far, with finish_reason "abort"."""
    body = await read_body(request, AbortBody)
    if request.app.state.settings.api_workers > 1:
        raise ApiError(
            400,
            "calls can't be aborted with several API processes (--api-workers): each knows only "
            "its own calls",
        )
    return json_response({"aborted": abort_calls(request.app.state, body)})


def abort_calls(state: Any, body: AbortBody) -> list[str]:
    """Abort the calls that are running; returns their ids. `state` is the application's."""
    calls: RunningCalls = state.running_calls
    wanted = calls.ids if body.all else body.request_ids or ()
    aborted = [one for one in wanted if one in calls]
    for request_id in aborted:
        calls.abort(request_id, state.llm)
    return aborted


def _plain(value: Any) -> Any:
    """A JSON-compatible value; other types become their `str`."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
