"""A request's fields -> SamplingParams, on top of the model's recommended defaults."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request

from llmc.async_llm import AsyncLLM
from llmc.errors import InvalidRequestError
from llmc.frontend.inputs import InputProcessor
from llmc.sampling_params import SamplingParams
from llmc.server.pooling_protocol import PooledBody
from llmc.server.protocol import GenerationBody
from llmc.server.sglang_protocol import SglangBody
from llmc.server.structured import structured_outputs


def sampling_params(
    body: GenerationBody,
    inputs: InputProcessor,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    **rest: Any,
) -> SamplingParams:
    """The sampling parameters of a request.

    `max_tokens` None or -1: until the context is full. `rest`: fields of one kind of body only.
    """
    options: dict[str, Any] = inputs.generation_defaults()
    for name in body.SAMPLING_FIELDS:
        value = getattr(body, name)
        if value is not None:
            options[name] = value
    if options.get("top_p") == 0:  # allowed by OpenAI: only the likeliest token
        options |= {"temperature": 0.0, "top_p": 1.0}
    if body.logit_bias is not None:
        options["logit_bias"] = _by_token(body.logit_bias)
    options["max_tokens"] = None if max_tokens == -1 else max_tokens
    options["logprobs"] = logprobs
    options["structured_outputs"] = structured_outputs(body)
    options.update(rest)
    return SamplingParams(**options)


def priority(llm: AsyncLLM, body: GenerationBody | PooledBody | SglangBody) -> int:
    """The caller's priority; InvalidRequestError if the server does not schedule by priority."""
    if body.priority and llm.config.scheduling_policy != "priority":
        raise InvalidRequestError(
            "priority needs a server started with --scheduling-policy priority; leave it out",
            param="priority",
        )
    return body.priority


def cache_salt(request: Request, body: GenerationBody | PooledBody | None) -> str | None:
    """The caller's salt; with --salt-by-api-key, combined with the key, so it can't be forged."""
    given = None if body is None else body.cache_salt
    owner: str | None = getattr(request.state, "cache_owner", None)
    if owner is None:
        return given
    text = f"{owner}/{given or ''}"
    return hashlib.sha256(text.encode()).hexdigest()


def _by_token(bias: dict[str, float]) -> dict[int, float]:
    """Integer keys from JSON's string keys: "50256" -> 50256."""
    by_token = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(
                f"logit_bias must be keyed by token ids, got {key[:80]!r}", param="logit_bias"
            )
        by_token[int(key)] = value
    return by_token
