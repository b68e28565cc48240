"""/v1/files, OpenAI's files API: the input and output files of batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from llmc.server.batch_store import MAX_FILE_BYTES, BatchStore, NewFile, StoredFile
from llmc.server.errors import ApiError, json_response
from llmc.server.list_page import list_page
from llmc.server.multipart import Part, boundary_of, read_parts

UPLOAD_TIMEOUT_S = 600.0
MAX_FIELD_BYTES = 1024  # of a non-file field
MAX_PAGE = 10_000
LEAST_KEEP_S, MAX_KEEP_S = 3600, 30 * 24 * 3600
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("file", "purpose", _ANCHOR, _SECONDS)


async def create_file(request: Request) -> Response:
    """Upload a file: a form with `purpose` (batch), `file` and optionally `expires_after`."""
    batches = store(request)
    boundary = boundary_of(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            with batches.new_file("batch", caller(request)) as new:
                name, keep_s = await _receive(request, boundary, new)
                made = await asyncio.to_thread(batches.keep, new, name, keep_s)
    except TimeoutError:
        raise ApiError(408, f"the file did not arrive within {UPLOAD_TIMEOUT_S:g} s") from None
    return json_response(described(made))


async def _receive(request: Request, boundary: bytes, new: NewFile) -> tuple[str, int | None]:
    """Write the uploaded file to `new`; returns its name and how many seconds to keep it."""
    name: str | None = None
    fields: dict[str, bytes] = {}
    part = Part("", None)
    num_bytes = 0
    async for piece in read_parts(_chunks(request), boundary):
        if isinstance(piece, Part):
            part = piece
            if part.name not in _FIELDS:
                raise ApiError(
                    400,
                    f"unknown parameter {part.name[:80]!r}",
                    param=part.name[:80],
                    code="unsupported_parameter",
                )
            if part.name == "file":
                if part.filename is None or name is not None:
                    raise ApiError(400, "file must be one file with a name", param="file")
                name = part.filename[:200]
        elif part.name == "file":
            num_bytes += len(piece)
            if num_bytes > MAX_FILE_BYTES:
                raise ApiError(413, f"the file is larger than {MAX_FILE_BYTES} bytes", param="file")
            new.file.write(piece)
        else:
            fields[part.name] = fields.get(part.name, b"") + piece
            if len(fields[part.name]) > MAX_FIELD_BYTES:
                raise ApiError(400, f"{part.name} is too long", param=part.name)
    if name is None:
        raise ApiError(400, "file is missing", param="file", code="missing_field")
    given = {key: value.decode("utf-8", errors="replace") for key, value in fields.items()}
    purpose = given.get("purpose", "")
    if purpose != "batch":
        raise ApiError(400, f"purpose must be batch, got {purpose[:80]!r}", param="purpose")
    return name, _keep_s(given)


def _keep_s(given: Mapping[str, str]) -> int | None:
    if _ANCHOR not in given and _SECONDS not in given:
        return None
    anchor, seconds = given.get(_ANCHOR, ""), given.get(_SECONDS, "")
    if anchor != "created_at":
        raise ApiError(400, f"{_ANCHOR} must be created_at, got {anchor[:80]!r}", param=_ANCHOR)
    is_number = seconds.isascii() and seconds.isdigit() and len(seconds) < 8
    if not is_number or not LEAST_KEEP_S <= int(seconds) <= MAX_KEEP_S:
        raise ApiError(
            400,
            f"{_SECONDS} must be from {LEAST_KEEP_S} to {MAX_KEEP_S}, got {seconds[:80]!r}",
            param=_SECONDS,
        )
    return int(seconds)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect:
        raise ApiError(400, "the connection closed before the body was complete") from None


async def list_files(request: Request) -> Response:
    purpose = request.query_params.get("purpose")
    found = await asyncio.to_thread(store(request).files, caller(request))
    shown = [described(one) for one in found if purpose in (None, one.purpose)]
    return json_response(list_page(request, shown, most=MAX_PAGE))


async def get_file(request: Request) -> Response:
    return json_response(described(_file(request)))


async def file_content(request: Request) -> Response:
    path = store(request).data(_file(request))
    return FileResponse(path, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    found = _file(request)
    batches = store(request)
    for batch in await asyncio.to_thread(batches.batches, found.caller):
        if batch.input_file_id == found.id and not batch.is_over:
            raise ApiError(400, f"{batch.id} reads this file; cancel it first", param="file_id")
    batches.delete(found)
    return json_response({"id": found.id, "object": "file", "deleted": True})


def store(request: Request) -> BatchStore:
    """The batch store; ApiError 404 if the server was started without --batch-dir."""
    found: BatchStore | None = request.app.state.batch_store
    if found is None:
        raise ApiError(
            404,
            "files and batches are off; start the server with --batch-dir DIR",
            code="not_enabled",
        )
    return found


def caller(request: Request) -> str:
    found: str = getattr(request.state, "caller", "")
    return found


def _file(request: Request) -> StoredFile:
    return store(request).file(request.path_params["name"], caller(request))


def described(stored: StoredFile) -> dict[str, Any]:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": stored.created_ns // 10**9,
        "filename": stored.name,
        "purpose": stored.purpose,
        "status": "processed",
        "status_details": None,
        "expires_at": stored.expires_s,
    }
