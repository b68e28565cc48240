"""GET /v1/models: what is served, under which names."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc.async_llm import AsyncLLM
from llmc.server.errors import ApiError, json_response
from llmc.startup.architecture_certificate import describe_status


def served_names(llm: AsyncLLM, names: Any) -> tuple[str, ...]:
    return tuple(names) or (llm.info.name,)


def model_name(request: Request, wanted: str | None) -> str:
    """The name to answer with. Absent means the served model; any other name is a 404."""
    names: tuple[str, ...] = request.app.state.names
    if wanted is None:
        wanted = names[0]
    adapters = request.app.state.adapters.by_name
    if wanted not in names and wanted not in adapters:
        known = ", ".join([*names, *adapters])
        raise ApiError(
            404,
            f"model {wanted[:200]!r} is not served here; there is {known:.1000}",
            param="model",
            code="model_not_found",
        )
    request.state.model = wanted
    return wanted


async def list_models(request: Request) -> Response:
    state = request.app.state
    data = [_card(request, name) for name in (*state.names, *state.adapters.by_name)]
    return json_response({"object": "list", "data": data})


async def get_model(request: Request) -> Response:
    return json_response(_card(request, model_name(request, request.path_params["name"])))


def _card(request: Request, name: str) -> dict[str, Any]:
    state = request.app.state
    info = state.llm.info
    adapter = state.adapters.by_name.get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "llmc",
        "root": state.names[0] if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else state.names[0],
        "max_model_len": info.max_model_len,
        "certificate": describe_status(info, is_checked=state.settings.certificate),
    }
