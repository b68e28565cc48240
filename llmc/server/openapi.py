"""GET /openapi.json: the API, described from the same models and routes that serve it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from llmc import __version__
from llmc.server.admin import AbortBody
from llmc.server.anthropic_protocol import CountTokensBody, MessagesBody
from llmc.server.batches import BatchBody
from llmc.server.errors import json_response
from llmc.server.files import LEAST_KEEP_S, MAX_KEEP_S
from llmc.server.ggml_protocol import (
    ApplyTemplateBody,
    ContentBody,
    GgmlCompletionBody,
    InfillBody,
)
from llmc.server.guard import ADMIN_PATHS, PUBLIC_PATHS
from llmc.server.ollama_protocol import (
    EmbedBody,
    GenerateBody,
    OldEmbedBody,
    OllamaChatBody,
    ShowBody,
)
from llmc.server.pooling_protocol import (
    EmbeddingBody,
    InputBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from llmc.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from llmc.server.responses_protocol import ResponsesBody
from llmc.server.schema_rules import Served, refine
from llmc.server.sglang_protocol import SglangBody
from llmc.text.chat import reads_documents
from llmc.text.infill import has_infill_tokens

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/embeddings": EmbeddingBody,
    "/pooling": PoolingBody,
    "/classify": InputBody,
    "/score": ScoreBody,
    "/v1/score": ScoreBody,
    "/rerank": RerankBody,
    "/v1/rerank": RerankBody,
    "/v2/rerank": RerankBody,
    "/reranking": RerankBody,
    "/v1/reranking": RerankBody,
    "/api/embed": EmbedBody,
    "/api/embeddings": OldEmbedBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": GenerateBody,
    "/api/show": ShowBody,
    "/completion": GgmlCompletionBody,
    "/infill": InfillBody,
    "/generate": SglangBody,
    "/embedding": ContentBody,
    "/apply-template": ApplyTemplateBody,
    "/v1/load_lora_adapter": LoadAdapterBody,
    "/v1/unload_lora_adapter": UnloadAdapterBody,
    "/v1/batches": BatchBody,
    "/abort_requests": AbortBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
EMBEDDING_PATHS = frozenset({"/v1/embeddings", "/api/embed", "/api/embeddings", "/embedding"})
SCORING_PATHS = frozenset(path for path, body in BODIES.items() if body in (RerankBody, ScoreBody))
GENERATING_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/completion",
        "/apply-template",
        "/generate",
    }
)
BATCH_PATHS = ("/v1/files", "/v1/batches")
FILE_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": LEAST_KEEP_S,
            "maximum": MAX_KEEP_S,
        },
    },
    "additionalProperties": False,
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

# The errors of other protocols, by path prefix (server/errors.py).
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


# The same key in either header; the operator's routes need a different key (server/guard.py).
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


async def openapi(request: Request) -> Response:
    state = request.app.state
    info, config = state.llm.info, state.llm.config
    served = Served(
        models=[*state.names, *state.adapters.by_name],
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        by_priority=config.scheduling_policy == "priority",
        pooling=info.pooling,
        reads_nothing=state.llm.tokenizer is not None and bool(state.llm.tokenizer.encode("")),
        infills=state.llm.tokenizer is not None and has_infill_tokens(state.llm.tokenizer),
        reads_images=info.images is not None,
        reads_documents=state.llm.tokenizer is not None and reads_documents(state.llm.tokenizer),
        has_batches=state.settings.batch_dir is not None,
        extra_args=info.extra_args,
    )
    described = describe(request.app.routes, served)
    if state.settings.api_keys:
        described["security"] = [{"bearer": []}, {"key": []}]
    if root_path := request.app.state.settings.root_path:
        described["servers"] = [{"url": root_path}]
    return json_response(described)


def describe(routes: list[Any], served: Served) -> dict[str, Any]:
    """An OpenAPI 3.1 document of `routes`."""
    template = "#/components/schemas/{model}"
    _, schemas = models_json_schema(
        [(model, "validation") for model in BODIES.values()], ref_template=template
    )
    defined = schemas.get("$defs", {})
    refine(defined, list(BODIES.values()), served)
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        if not route.include_in_schema or not _is_served(path, served):
            continue
        verbs = sorted(route.methods - {"HEAD"})
        made = {verb.lower(): _operation(route, path) for verb in verbs}
        paths.setdefault(path, {}).update(made)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmc", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**defined, "Error": ERROR, **dict(ERRORS.values())},
            "securitySchemes": SECURITY,
        },
    }


def _is_served(path: str, served: Served) -> bool:
    """Whether this server supports the route; the others always respond with a 400 or 404."""
    if path.startswith(BATCH_PATHS):
        return served.has_batches
    pooling = served.pooling
    if path == "/infill":
        return served.infills and pooling is None
    if path in EMBEDDING_PATHS:
        return pooling is not None and pooling.task == "embed"
    if path in SCORING_PATHS:
        return pooling is not None and pooling.scores_pairs
    if path == "/classify":
        return pooling is not None and pooling.task == "classify"
    return (path not in GENERATING_PATHS) if pooling is not None else path != "/pooling"


def _operation(route: Any, path: str) -> dict[str, Any]:
    error = next((one for start, (one, _) in ERRORS.items() if path.startswith(start)), "Error")
    failure = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": (route.endpoint.__doc__ or route.name.replace("_", " ")).strip(),
        "responses": {
            "200": {"description": "the response"},
            "default": {"description": "an error", "content": failure},
        },
    }
    if path in PUBLIC_PATHS:
        operation["security"] = []
    if path in ADMIN_PATHS:
        operation["security"] = [{"bearer": []}, {"key": []}]
    if path in BODIES and "POST" in route.methods:
        schema = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if path == "/v1/files" and "POST" in route.methods:
        operation["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": FILE_FORM}},
        }
    if "{name}" in path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation
