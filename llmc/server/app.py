"""The ASGI application: routes, and what surrounds them.

Guard (request id, host, key, drain, log) -> router -> endpoint -> GenerationResponse
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.async_llm import AsyncLLM
from llmc.processes.engine_processes import EngineProcesses
from llmc.server import (
    adapters,
    admin,
    anthropic,
    batches,
    chat,
    completions,
    engine_events,
    files,
    ggml,
    models,
    ollama,
    openapi,
    page,
    pooling,
    responses,
    sglang,
    sleep,
    status,
    tokens,
)
from llmc.server.batch_runner import BatchRunner
from llmc.server.batch_store import BatchStore
from llmc.server.errors import unknown_route
from llmc.server.guard import Guard
from llmc.server.metrics import Metrics
from llmc.server.responses_store import ResponseStore
from llmc.server.running_calls import RunningCalls
from llmc.server.settings import ServerSettings
from llmc.server.tracing import Tracer

Endpoint = Callable[[Request], Awaitable[Any]]
OnRoute = Callable[[str, str, int, float], None]  # method, route, status, seconds

ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", chat.create_chat_completion),
    ("POST", "/v1/completions", completions.create_completion),
    ("POST", "/v1/responses", responses.create_response),
    ("POST", "/v1/responses/input_tokens", responses.count_input_tokens),
    ("GET", "/v1/responses/{name}", responses.get_response),
    ("DELETE", "/v1/responses/{name}", responses.delete_response),
    ("GET", "/v1/responses/{name}/input_items", responses.list_input_items),
    ("POST", "/v1/messages", anthropic.create_message),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    ("POST", "/v1/embeddings", pooling.create_embedding),
    ("POST", "/pooling", pooling.create_pooling),
    ("POST", "/classify", pooling.classify),
    ("POST", "/score", pooling.score),
    ("POST", "/v1/score", pooling.score),
    ("POST", "/rerank", pooling.rerank),
    ("POST", "/v1/rerank", pooling.rerank),
    ("POST", "/v2/rerank", pooling.rerank),
    ("POST", "/reranking", pooling.rerank),
    ("POST", "/v1/reranking", pooling.rerank),
    ("POST", "/v1/files", files.create_file),
    ("GET", "/v1/files", files.list_files),
    ("GET", "/v1/files/{name}", files.get_file),
    ("DELETE", "/v1/files/{name}", files.delete_file),
    ("GET", "/v1/files/{name}/content", files.file_content),
    ("POST", "/v1/batches", batches.create_batch),
    ("GET", "/v1/batches", batches.list_batches),
    ("GET", "/v1/batches/{name}", batches.get_batch),
    ("POST", "/v1/batches/{name}/cancel", batches.cancel_batch),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/models", models.list_models),
    ("GET", "/v1/models/{name:path}", models.get_model),
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/embed", ollama.embed),
    ("POST", "/api/embeddings", ollama.embeddings),
    ("GET", "/api/tags", ollama.tags),
    ("GET", "/api/ps", ollama.ps),
    ("POST", "/api/show", ollama.show),
    ("GET", "/api/version", ollama.version),
    ("POST", "/completion", ggml.completion),
    ("POST", "/infill", ggml.infill),
    ("POST", "/embedding", ggml.embed),
    ("POST", "/apply-template", ggml.apply_template),
    ("GET", "/props", ggml.props),
    ("POST", "/generate", sglang.generate),
    ("GET", "/model_info", sglang.model_info),
    ("GET", "/get_model_info", sglang.model_info),
    ("POST", "/v1/load_lora_adapter", adapters.load_lora_adapter),
    ("POST", "/v1/unload_lora_adapter", adapters.unload_lora_adapter),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("GET", "/tokenizer_info", tokens.tokenizer_info),
    ("GET", "/health", status.health),
    ("GET", "/v1/health", status.health),
    ("GET", "/ready", status.ready),
    ("GET", "/health_generate", status.ready),
    ("GET,POST", "/ping", status.health),
    ("GET", "/version", status.version),
    ("GET", "/metrics", status.metrics),
    ("GET", "/load", admin.load),
    ("GET", "/server_info", admin.server_info),
    ("POST", "/start_profile", admin.start_profile),
    ("POST", "/stop_profile", admin.stop_profile),
    ("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
    ("POST", "/abort_requests", admin.abort_requests),
    ("POST", "/sleep", sleep.go_to_sleep),
    ("POST", "/wake_up", sleep.wake_up),
    ("GET", "/is_sleeping", sleep.is_sleeping),
    ("GET", "/v1/engine/events", engine_events.engine_events),
    ("GET", "/openapi.json", openapi.openapi),
)
# The web page is for people: its routes are not in the OpenAPI document, and --no-ui replaces them
# by BARE_ROUTES.
PAGE_ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", page.PAGE, page.page),
    ("GET", page.DOCS, page.docs),
    ("GET", page.FILES + "{name}", page.page_file),
)
BARE_ROUTES: tuple[tuple[str, str, Endpoint], ...] = (("GET", page.PAGE, page.running),)


def create_app(
    llm: AsyncLLM, settings: ServerSettings, engines: EngineProcesses | None = None
) -> Starlette:
    """The ASGI application for a loaded model. `serve` runs it; tests may run it differently.

    `engines`: the engine processes of `llm`, if it has any that a sleep may end.
    """
    names = models.served_names(llm, settings.served_model_names)
    metrics = Metrics(llm, names[0], vllm_names=settings.vllm_metrics)
    app = guarded_app(ROUTES, settings, lambda: llm.is_draining, metrics.answered)
    state = app.state
    state.llm = llm
    if llm.info.images is None:
        state.most_body_bytes = settings.max_body_bytes
    state.sleeper = sleep.Sleeper(llm, engines)
    state.responses = ResponseStore()
    state.names = names
    state.adapters = adapters.Adapters(llm, settings, state.names)
    state.created = int(time.time())
    state.metrics = metrics
    state.running_calls = RunningCalls()
    state.tracer = None
    if settings.otlp_traces_endpoint is not None:
        state.tracer = Tracer.to(settings.otlp_traces_endpoint)
    state.engine_feed = engine_events.EngineFeed(llm)
    state.batch_store = state.batch_runner = None
    if settings.batch_dir is not None:
        state.batch_store = store = BatchStore(Path(settings.batch_dir).expanduser())
        state.batch_runner = BatchRunner(app, store, salt_by_api_key=settings.salt_by_api_key)
    return app


def guarded_app(
    routes: Sequence[tuple[str, str, Endpoint]],
    settings: ServerSettings,
    is_draining: Callable[[], bool],
    answered: OnRoute,
) -> Starlette:
    """An application of these routes and the web page's, wrapped in the Guard."""
    guard = Middleware(
        Guard, settings=settings, is_draining=is_draining, on_answer=_counted_by(answered, routes)
    )
    middleware = [guard]
    if settings.allowed_origins:
        # Outside the Guard: a browser's preflight request carries no key.
        middleware.insert(0, _for_web_pages(settings.allowed_origins))
    if settings.root_path:
        middleware.insert(0, Middleware(_Mounted, root_path=settings.root_path))
    app = Starlette(
        routes=[*_routes(routes), *_routes(PAGE_ROUTES if settings.ui else BARE_ROUTES, False)],
        middleware=middleware,
        exception_handlers={HTTPException: unknown_route},  # the Guard handles all others
    )
    app.router.redirect_slashes = False
    app.state.settings = settings
    app.state.most_body_bytes = settings.max_image_body_bytes  # unless its model takes no images
    return app


def _counted_by(
    answered: OnRoute, routes: Sequence[tuple[str, str, Endpoint]]
) -> Callable[[Scope, int, float], None]:
    """Counts responses by route, not by path: clients choose paths, so they are unbounded."""
    # A call with several paths is counted under the first.
    known = (*routes, *ROUTES, *PAGE_ROUTES, *BARE_ROUTES)
    paths = {call: path for _, path, call in reversed(known)}

    def count(scope: Scope, status: int, seconds: float) -> None:
        endpoint = scope.get("endpoint")
        handler = paths.get(endpoint, "none") if endpoint is not None else "none"
        answered(scope["method"], handler, status, seconds)

    return count


class _Mounted:
    """Strips the root path that a proxy serves us under, if the proxy left it in the path."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._root_path or path.startswith(self._root_path + "/"):
            scope = {**scope, "path": path[len(self._root_path) :] or "/"}
        await self._app(scope, receive, send)


def _routes(table: Sequence[tuple[str, str, Endpoint]], in_schema: bool = True) -> list[Route]:
    return [
        Route(path, call, methods=verbs.split(","), include_in_schema=in_schema)
        for verbs, path, call in table
    ]


def _for_web_pages(origins: Sequence[str]) -> Middleware:
    """Cross-origin requests (https://fetch.spec.whatwg.org/#http-cors-protocol), no cookies."""
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id"],
        max_age=600,
    )
