"""The application of a server with several models: forwards each request to the right one.

Guard -> forward: the body's "model" -> ModelManager.use -> that model's router (app.py)
      -> /v1/models, /health, /metrics ...: for the whole server, answered here
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llmc import __version__
from llmc.server import admin, app, engine_events, models, ollama, responses, sleep, status
from llmc.server.admin import AbortBody, abort_calls
from llmc.server.body import parse_object, read_body, read_bytes
from llmc.server.errors import ApiError, json_response
from llmc.server.metrics import HttpMetrics
from llmc.server.model_manager import ModelManager, ServedModel
from llmc.server.settings import ServerSettings
from llmc.server.vllm_metrics import vllm_registry

LATEST = ":latest"  # the suffix that Ollama's clients add to a name


def create_several_models_app(manager: ModelManager, settings: ServerSettings) -> Starlette:
    metrics = AllModelsMetrics(manager, settings)
    made = app.guarded_app(ROUTES, settings, lambda: manager.is_draining, metrics.http.answered)
    state = made.state
    state.llm = state.manager = manager
    state.responses = manager.responses
    state.metrics = metrics
    state.names = tuple(manager.models)
    state.created = int(time.time())
    state.tracer = state.batch_runner = state.adapters = None
    return made


# ---- requests to one model ----


class Forwarded:
    """The ASGI response of a model's own application. `body` was already read."""

    def __init__(self, manager: ModelManager, model: ServedModel, body: bytes) -> None:
        self._manager = manager
        self._model = model
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread = [self._body]

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        async with self._manager.use(self._model) as inner:
            await inner.router({**scope, "app": inner}, replay, send)


async def forward(request: Request) -> Forwarded:
    """Forward to the model named in the body, or in the query of a GET."""
    manager: ModelManager = request.app.state.manager
    request.scope["endpoint"] = _ENDPOINTS[request.url.path]  # the metrics count by endpoint
    if request.method == "POST":
        body = await read_bytes(request)
        given = parse_object(body)
        name = given.get("model")
        if name is None and request.url.path == "/api/show":
            name = given.get("name")
        return Forwarded(manager, _named(manager, name), body)
    return Forwarded(manager, _asked(request), b"")


async def watch_engine(request: Request) -> Any:
    """A loaded model's engine state, as events. Listening does not keep the model loaded."""
    model = _asked(request)
    if model.app is None:
        raise ApiError(503, f"{model.name} is not loaded", code="model_not_loaded")
    state = model.app.state
    return engine_events.EngineEventsResponse(state.engine_feed, state.llm, state.settings)


def _named(manager: ModelManager, name: Any) -> ServedModel:
    if name is None:
        raise ApiError(
            400,
            f"model is missing: name one of {', '.join(manager.models):.1000}",
            param="model",
            code="missing_field",
        )
    found = manager.models.get(name) if isinstance(name, str) else None
    if found is None and isinstance(name, str):
        found = manager.models.get(name.removesuffix(LATEST))
    if found is None:
        raise models.not_served(str(name), manager.models)
    return found


def _asked(request: Request) -> ServedModel:
    """The model named in the query, or the first loaded one, or the first one."""
    manager: ModelManager = request.app.state.manager
    if name := request.query_params.get("model"):
        return _named(manager, name)
    every = list(manager.models.values())
    return next((model for model in every if model.state == "loaded"), every[0])


# ---- the server as a whole ----


async def list_models(request: Request) -> Response:
    data = [_card(request, model) for model in request.app.state.manager.models.values()]
    return models.cards_response(request, data)


async def get_model(request: Request) -> Response:
    model = _named(request.app.state.manager, request.path_params["name"])
    return models.card_response(request, _card(request, model))


def _card(request: Request, model: ServedModel) -> dict[str, Any]:
    """The model object; fields that are unknown until the model is first loaded are null."""
    state = request.app.state
    card = {
        "id": model.name,
        "object": "model",
        "created": state.created,
        "owned_by": "llmc",
        "root": model.name,
        "parent": None,
        "max_model_len": None,
        "certificate": None,
    }
    if model.app is not None:
        card |= models.card(model.app.state, model.name)
    return {**card, "created": state.created, "state": model.state, "error": model.error or None}


async def tags(request: Request) -> Response:
    """Ollama's list."""
    manager: ModelManager = request.app.state.manager
    return json_response(
        {
            "models": [
                ollama.card(
                    model.name,
                    request.app.state.created,
                    None if model.llm is None else model.llm.info,
                )
                for model in manager.models.values()
            ]
        }
    )


async def ps(request: Request) -> Response:
    """Ollama's list of the loaded ones."""
    state = request.app.state
    loaded = [one for one in state.manager.models.values() if one.state == "loaded"]
    return json_response(
        {
            "models": [
                ollama.running_card(model.name, state.created, model.llm.info)
                for model in loaded
                if model.llm is not None
            ]
        }
    )


async def health(request: Request) -> Response:
    """200 as long as the server responds: a model's failure does not affect the others."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    if request.app.state.manager.is_draining:
        raise ApiError(503, "the server is shutting down", code="shutting_down")
    return json_response({"status": "ready"})


async def load(request: Request) -> Response:
    """The current load, by model and in total."""
    manager: ModelManager = request.app.state.manager
    stats = manager.stats()
    each = {
        model.name: {"state": model.state, "server_load": model.num_users}
        for model in manager.models.values()
    }
    return json_response(
        {
            "server_load": manager.num_active,
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage": 1 - stats.num_free_blocks / max(1, stats.num_blocks),
            "models": each,
        }
    )


async def server_info(request: Request) -> Response:
    """What is running, by model; no keys."""
    manager: ModelManager = request.app.state.manager
    each = {
        model.name: {
            "state": model.state,
            "error": model.error or None,
            "memory_bytes": await model.measure(),
            **({} if model.llm is None else admin.describe(model.llm)),
        }
        for model in manager.models.values()
    }
    settings = admin.public_settings(request.app.state.settings)
    return json_response({"version": __version__, "models": each, "server": settings})


async def operate(request: Request) -> Response:
    """Profile or reset the model named in the query, or each loaded one."""
    operation = request.url.path.removeprefix("/")
    messages = {}
    for model in _chosen(request):
        if model.llm is not None and model.state == "loaded":
            messages[model.name] = await admin.operated(
                model.llm, operation, request.app.state.settings
            )
    return json_response({"message": messages})


async def abort_requests(request: Request) -> Response:
    """Abort calls. Their clients get the output so far, with finish_reason "abort"."""
    body = await read_body(request, AbortBody)
    manager: ModelManager = request.app.state.manager
    apps = [model.app for model in manager.models.values() if model.app is not None]
    aborted = [one for inner in apps for one in abort_calls(inner.state, body)]
    return json_response({"aborted": aborted})


async def go_to_sleep(request: Request) -> Response:
    """Put the model named in the query, or every loaded one, to sleep until it is woken."""
    level, aborts = sleep.wanted(request)
    manager: ModelManager = request.app.state.manager
    for model in _chosen(request):
        await manager.sleep(model, level, aborts=aborts)
    return json_response(_sleeping(request))


async def wake_up(request: Request) -> Response:
    manager: ModelManager = request.app.state.manager
    for model in _chosen(request):
        if model.state == "asleep":
            await manager.ensure_loaded(model)
    return json_response(_sleeping(request))


async def is_sleeping(request: Request) -> Response:
    return json_response(_sleeping(request))


def _sleeping(request: Request) -> dict[str, Any]:
    asleep = [model.name for model in _chosen(request) if model.state == "asleep"]
    return {"is_sleeping": bool(asleep), "models": asleep}


def _chosen(request: Request) -> Iterable[ServedModel]:
    manager: ModelManager = request.app.state.manager
    name = request.query_params.get("model")
    return [_named(manager, name)] if name else manager.models.values()


OWN: Mapping[str, app.Endpoint] = {
    "/v1/models": list_models,
    "/models": list_models,
    "/v1/models/{name:path}": get_model,
    "/api/tags": tags,
    "/api/ps": ps,
    "/api/version": ollama.version,
    "/v1/responses/{name}": responses.get_response,
    "/v1/responses/{name}/input_items": responses.list_input_items,
    "/health": health,
    "/v1/health": health,
    "/ping": health,
    "/ready": ready,
    "/health_generate": ready,
    "/version": status.version,
    "/metrics": status.metrics,
    "/load": load,
    "/server_info": server_info,
    "/start_profile": operate,
    "/stop_profile": operate,
    "/reset_prefix_cache": operate,
    "/abort_requests": abort_requests,
    "/sleep": go_to_sleep,
    "/wake_up": wake_up,
    "/is_sleeping": is_sleeping,
    "/v1/engine/events": watch_engine,
}
ABSENT = ("/v1/files", "/v1/batches", "/v1/load_lora", "/v1/unload_lora")  # single-model only
ROUTES = tuple(
    (
        verbs,
        path,
        responses.delete_response
        if (verbs, path) == ("DELETE", "/v1/responses/{name}")
        else OWN.get(path, forward),
    )
    for verbs, path, _ in app.ROUTES
    if not path.startswith(ABSENT)
)

_ENDPOINTS = {path: call for _, path, call in app.ROUTES}


class AllModelsMetrics:
    """The metrics of all loaded models as one text; samples are labeled with `model_name`."""

    def __init__(self, manager: ModelManager, settings: ServerSettings) -> None:
        self._manager = manager
        self._own = CollectorRegistry()
        self.http = HttpMetrics(self._own)
        self._vllm = vllm_registry(self) if settings.vllm_metrics else None

    def render(self) -> bytes:
        text = generate_latest(self)
        return text if self._vllm is None else text + generate_latest(self._vllm)

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        apps = [model.app for model in self._manager.models.values() if model.app is not None]
        for registry in (self._own, *(inner.state.metrics.shown for inner in apps)):
            for family in registry.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        loaded = GaugeMetricFamily("llmc:model_loaded", "Model loaded.", labels=("model_name",))
        for model in self._manager.models.values():
            loaded.add_metric([model.name], model.state == "loaded")
        return [*families.values(), loaded]
