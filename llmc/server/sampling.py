"""A request's fields -> SamplingParams, over the defaults that the model recommends."""

from __future__ import annotations

from typing import Any

from llmc.errors import InvalidRequestError
from llmc.front.inputs import InputProcessor
from llmc.sampling_params import SamplingParams
from llmc.server.protocol import GenerationBody


def sampling_params(
    body: GenerationBody,
    inputs: InputProcessor,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """`max_tokens` None: until the context is full."""
    options: dict[str, Any] = inputs.generation_defaults()
    for name in body.SAMPLING_FIELDS:
        value = getattr(body, name)
        if value is not None:
            options[name] = value
    if body.logit_bias is not None:
        options["logit_bias"] = _by_token(body.logit_bias)
    options["max_tokens"] = max_tokens
    options["logprobs"] = logprobs
    return SamplingParams(**options)


def _by_token(bias: dict[str, float]) -> dict[int, float]:
    """JSON has no integer keys: "50256" is one."""
    by_token = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(
                f"logit_bias must be keyed by token ids, got {key[:80]!r}", param="logit_bias"
            )
        by_token[int(key)] = value
    return by_token
