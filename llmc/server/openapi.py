"""GET /openapi.json: the API described from the same models and routes that serve it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import llmc
from llmc.server.admin import AbortBody
from llmc.server.anthropic_protocol import CountTokensBody, MessagesBody
from llmc.server.errors import json_response
from llmc.server.ollama_protocol import GenerateBody, OllamaChatBody, ShowBody
from llmc.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from llmc.server.responses_protocol import ResponsesBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": GenerateBody,
    "/api/show": ShowBody,
    "/v1/load_lora_adapter": LoadAdapterBody,
    "/v1/unload_lora_adapter": UnloadAdapterBody,
    "/abort_requests": AbortBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

# The errors of other protocols, by the beginning of their paths (server/errors.py).
ERRORS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/messages": (
        "AnthropicError",
        {
            "type": "object",
            "required": ["type", "error"],
            "properties": {
                "type": {"const": "error"},
                "error": {
                    "type": "object",
                    "required": ["type", "message"],
                    "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                },
            },
        },
    ),
    "/api/": (
        "OllamaError",
        {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    ),
}


async def openapi(request: Request) -> Response:
    described = describe(request.app.routes)
    if root_path := request.app.state.settings.root_path:
        described["servers"] = [{"url": root_path}]
    return json_response(described)


def describe(routes: list[Any]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of `routes`."""
    template = "#/components/schemas/{model}"
    _, schemas = models_json_schema(
        [(model, "validation") for model in BODIES.values()], ref_template=template
    )
    paths: dict[str, Any] = {}
    for route in routes:
        if not route.include_in_schema:
            continue
        path = route.path.replace(":path}", "}")
        verbs = sorted(route.methods - {"HEAD"})
        made = {verb.lower(): _operation(route, path) for verb in verbs}
        paths.setdefault(path, {}).update(made)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmc", "version": llmc.__version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": ERROR, **dict(ERRORS.values())}
        },
    }


def _operation(route: Any, path: str) -> dict[str, Any]:
    error = next((one for start, (one, _) in ERRORS.items() if path.startswith(start)), "Error")
    failure = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": (route.endpoint.__doc__ or route.name.replace("_", " ")).strip(),
        "responses": {
            "200": {"description": "the answer"},
            "default": {"description": "an error", "content": failure},
        },
    }
    if path in BODIES:
        schema = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if "{name}" in path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation
