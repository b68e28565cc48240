"""GET /v1/models: the served models and adapters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc.async_llm import AsyncLLM
from llmc.server.errors import ApiError, is_of_anthropic, json_response
from llmc.startup.architecture_certificate import describe_status


def served_names(llm: AsyncLLM, names: Any) -> tuple[str, ...]:
    return tuple(names) or (llm.info.name,)


def not_served(wanted: str, known: Iterable[str]) -> ApiError:
    return ApiError(
        404,
        f"model {wanted[:200]!r} is not served here; available: {', '.join(known):.1000}",
        param="model",
        code="model_not_found",
    )


def model_name(request: Request, wanted: str | None) -> str:
    """The requested model's name; None means the first served one. An unknown name is a 404."""
    names: tuple[str, ...] = request.app.state.names
    if wanted is None:
        wanted = names[0]
    adapters = request.app.state.adapters.by_name
    if wanted not in names and wanted not in adapters:
        raise not_served(wanted, [*names, *adapters])
    request.state.model = wanted
    return wanted


def all_names(state: Any) -> tuple[str, ...]:
    """Of the model and its adapters. `state` is the application's."""
    return (*state.names, *state.adapters.by_name)


async def list_models(request: Request) -> Response:
    state = request.app.state
    return cards_response(request, [card(state, name) for name in all_names(state)])


async def get_model(request: Request) -> Response:
    name = model_name(request, request.path_params["name"])
    return card_response(request, card(request.app.state, name))


def cards_response(request: Request, cards: Sequence[dict[str, Any]]) -> Response:
    """A list of model objects, as the client's protocol has it."""
    if not is_of_anthropic(request.scope):
        return json_response({"object": "list", "data": cards})
    names = [one["id"] for one in cards]
    return json_response(
        {
            "data": [_anthropic_card(one) for one in cards],
            "first_id": names[0],
            "last_id": names[-1],
            "has_more": False,  # they are all on one page
        }
    )


def card_response(request: Request, one: dict[str, Any]) -> Response:
    return json_response(_anthropic_card(one) if is_of_anthropic(request.scope) else one)


def _anthropic_card(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "model",
        "id": one["id"],
        "display_name": one["id"],
        "created_at": datetime.fromtimestamp(one["created"], UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": one["max_model_len"],
        "max_tokens": one["max_model_len"],
    }


def card(state: Any, name: str) -> dict[str, Any]:
    """The model object of a model or adapter. `state` is the application's."""
    info = state.llm.info
    path = state.adapters.given_paths.get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "llmc",
        "root": path or state.names[0],
        "parent": state.names[0] if path else None,
        "max_model_len": info.max_model_len,
        "task": "generate" if info.pooling is None else info.pooling.task,
        "state": "asleep" if state.sleeper.level else "loaded",
        "certificate": describe_status(info, is_checked=state.settings.certificate),
    }
