"""The ASGI application: routes, and what surrounds them.

Guard (request id, host, key, drain, log) -> router -> endpoint -> GenerationResponse
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route

from llmc.async_llm import AsyncLLM
from llmc.server import chat, completions, models, openapi, status, tokens
from llmc.server.errors import unknown_route
from llmc.server.guard import Guard
from llmc.server.metrics import Metrics
from llmc.server.settings import ServerSettings

Endpoint = Callable[[Request], Awaitable[Any]]

ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", chat.create_chat_completion),
    ("POST", "/v1/completions", completions.create_completion),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{name:path}", models.get_model),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("GET", "/tokenizer_info", tokens.tokenizer_info),
    ("GET", "/health", status.health),
    ("GET", "/ready", status.ready),
    ("GET,POST", "/ping", status.health),
    ("GET", "/version", status.version),
    ("GET", "/metrics", status.metrics),
    ("GET", "/openapi.json", openapi.openapi),
)


def create_app(llm: AsyncLLM, settings: ServerSettings) -> Starlette:
    """The server's application on a loaded model. `serve` runs it; tests may run it otherwise."""
    middleware = [Middleware(Guard, settings=settings, is_draining=lambda: llm.is_draining)]
    if settings.allowed_origins:
        # around the Guard: browsers send no key when they ask whether they may
        middleware.insert(0, _for_web_pages(settings.allowed_origins))
    app = Starlette(
        routes=[Route(path, call, methods=verbs.split(",")) for verbs, path, call in ROUTES],
        middleware=middleware,
        exception_handlers={HTTPException: unknown_route},  # all else is for the Guard
    )
    app.router.redirect_slashes = False
    state = app.state
    state.llm = llm
    state.settings = settings
    state.names = models.served_names(llm, settings.served_model_names)
    state.created = int(time.time())
    state.metrics = Metrics(llm, state.names[0])
    return app


def _for_web_pages(origins: Sequence[str]) -> Middleware:
    """Cross-origin requests (https://fetch.spec.whatwg.org/#http-cors-protocol), no cookies."""
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
        max_age=600,
    )
