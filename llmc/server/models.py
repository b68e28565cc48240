"""GET /v1/models: what is served, under which names."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc.async_llm import AsyncLLM
from llmc.server.errors import ApiError, json_response


def served_names(llm: AsyncLLM, names: Any) -> tuple[str, ...]:
    return tuple(names) or (llm.info.name,)


def model_name(request: Request, wanted: str | None) -> str:
    """The name to answer with. Absent means the served model; any other name is a 404."""
    names: tuple[str, ...] = request.app.state.names
    if wanted is None:
        return names[0]
    if wanted not in names:
        raise ApiError(
            404,
            f"model {wanted[:200]!r} is not served here; there is {', '.join(names)}",
            param="model",
            code="model_not_found",
        )
    return wanted


async def list_models(request: Request) -> Response:
    data = [_card(request, name) for name in request.app.state.names]
    return json_response({"object": "list", "data": data})


async def get_model(request: Request) -> Response:
    return json_response(_card(request, model_name(request, request.path_params["name"])))


def _card(request: Request, name: str) -> dict[str, Any]:
    state = request.app.state
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "llmc",
        "root": state.names[0],
        "parent": None,
        "max_model_len": state.llm.info.max_model_len,
    }
