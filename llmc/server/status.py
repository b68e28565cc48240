"""/health, /ready, /ping, /version, /metrics: for load balancers, dashboards and people."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llmc import __version__
from llmc.async_llm import AsyncLLM
from llmc.errors import EngineAsleepError, EngineDeadError
from llmc.server.errors import ApiError, json_response


async def health(request: Request) -> Response:
    """200 as long as the engine is alive or asleep."""
    llm: AsyncLLM = request.app.state.llm
    if llm.is_asleep:
        return json_response({"status": "asleep"})
    llm.check_health()
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 if a request sent now can expect a response."""
    llm: AsyncLLM = request.app.state.llm
    if llm.is_asleep:
        raise EngineAsleepError(f"{llm.info.name} is asleep")
    llm.check_health()
    if llm.is_draining:
        raise ApiError(503, "the server is shutting down", code="shutting_down")
    if llm.is_stalled:
        raise EngineDeadError("requests are waiting and the engine makes no progress")
    return json_response({"status": "ready"})


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def metrics(request: Request) -> Response:
    text = request.app.state.metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
