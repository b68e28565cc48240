"""GET /openapi.json: the API described from the same models and routes that serve it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import llmc
from llmc.server.errors import json_response
from llmc.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
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


async def openapi(request: Request) -> Response:
    return json_response(describe(request.app.routes))


def describe(routes: list[Any]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of `routes`."""
    template = "#/components/schemas/{model}"
    _, schemas = models_json_schema(
        [(model, "validation") for model in BODIES.values()], ref_template=template
    )
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        verbs = sorted(route.methods - {"HEAD"})
        paths[path] = {verb.lower(): _operation(route, path) for verb in verbs}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmc", "version": llmc.__version__},
        "paths": paths,
        "components": {"schemas": {**schemas.get("$defs", {}), "Error": ERROR}},
    }


def _operation(route: Any, path: str) -> dict[str, Any]:
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
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
