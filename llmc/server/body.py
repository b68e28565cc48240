"""Reads a request's JSON body and validates it against a pydantic model.

The order matters: media type and encoding first, then the bytes, up to the limit and the deadline,
then JSON (the parser limits depth, UTF-8 and number syntax), then the fields.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from llmc.errors import InvalidRequestError
from llmc.server.errors import ApiError
from llmc.server.settings import MAX_SEQUENCES, ServerSettings

M = TypeVar("M", bound=BaseModel)

UNTYPED_PATHS = ("/api/", "/completion", "/infill", "/embedding", "/apply-template", "/tokenize")


async def read_body(request: Request, model: type[M]) -> M:
    """The body as `model`; ApiError 400, 408, 413 or 415, or pydantic's ValidationError."""
    return model.model_validate(parse_object(await read_bytes(request)), strict=True)


async def read_bytes(request: Request) -> bytes:
    """The body of a JSON request, within the limits; ApiError 400, 408, 413 or 415."""
    settings: ServerSettings = request.app.state.settings
    _check_headers(request)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await _read(request, request.app.state.most_body_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {settings.body_timeout_s:g} s"
        ) from None


def parse_object(raw: bytes) -> dict[str, Any]:
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as exc:
        raise ApiError(400, f"the body is not valid JSON: {exc}", code="invalid_json") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ApiError(400, f"the body must be a JSON object, got {kind}", code="invalid_json")
    return value


def _check_headers(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Clients of these APIs may name no type, or curl's. A web page, which names its origin, has to:
    # browsers let it send the others unasked.
    is_free = request.url.path.startswith(UNTYPED_PATHS) and "origin" not in request.headers
    if media_type != "application/json" and not is_free:
        raise ApiError(
            415,
            f"content-type must be application/json, got {media_type[:80] or 'none'}",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"content-encoding {encoding[:80]!r} is not supported; send it plain")


async def _read(request: Request, limit: int) -> bytes:
    """Count bytes as they arrive: Content-Length may be absent or wrong."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > limit:
                raise _too_large(limit)
    except ClientDisconnect:
        raise ApiError(400, "the connection closed before the body was complete") from None
    return bytes(raw)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes; send less in one call")


def check_num_sequences(num_prompts: int, each: int, param: str) -> None:
    """Raise InvalidRequestError if a call asks for too many sequences. `param`: the field that says
    how many each prompt gets."""
    count = num_prompts * each
    if count > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{num_prompts} prompts with {param}={each} make {count} sequences; the limit is "
            f"{MAX_SEQUENCES}",
            param=param,
        )


def split_inputs(given: str | list[Any], *, name: str, most: int) -> list[str | list[int]]:
    """str, [str], [int] or [[int]] -> a list of strings and token id lists. `name`: the field."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError(f"{name} must not be an empty list", param=name)
    if not isinstance(given[0], list | str):
        return [given]  # token ids, each of which is checked later
    if len(given) > most:
        raise InvalidRequestError(
            f"{len(given)} {name}s in one call; the limit is {most}", param=name
        )
    for index, one in enumerate(given):
        if not isinstance(one, list | str):
            raise InvalidRequestError(
                f"{name}[{index}] must be text or a list of token ids, got {one!r:.80}",
                param=f"{name}[{index}]",
            )
    return list(given)
