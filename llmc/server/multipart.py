"""Streaming parser for multipart forms (RFC 7578): only the current piece is in memory."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from llmc.server.errors import ApiError

MAX_HEAD_BYTES = 8192  # of a part's headers
MAX_PARTS = 16
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;",]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="((?:[^"\\\r\n]|\\.)*)"', re.IGNORECASE)
_FILENAME = re.compile(rb'[;\s]filename="((?:[^"\\\r\n]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """The start of a field. `filename` is None for non-file fields."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """The form's boundary; ApiError 415 for another media type, 400 without a boundary."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(415, f"content-type must be multipart/form-data, got {kind[:80] or 'none'}")
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise ApiError(400, "content-type has no usable boundary")
    return (found[1] or found[2]).encode("latin-1")


async def read_parts(chunks: AsyncIterator[bytes], boundary: bytes) -> AsyncIterator[Part | bytes]:
    """Yield each field as a Part, followed by its bytes in pieces. ApiError 400 if malformed."""
    border = b"\r\n--" + boundary
    buffer = bytearray(b"\r\n")  # the first boundary has no line break before it
    is_inside = is_over = False
    num_parts = 0
    async for chunk in chunks:
        if is_over:
            continue  # data after the last boundary is ignored
        buffer += chunk
        while not is_over:
            at = buffer.find(border)
            if is_inside:
                known = at if at >= 0 else len(buffer) - len(border) + 1
                if known > 0:
                    yield bytes(buffer[:known])
                    del buffer[:known]
                    at = 0 if at >= 0 else -1
            elif at < 0 and len(buffer) > MAX_HEAD_BYTES:
                raise _broken("it does not begin with its boundary")
            if at < 0:
                break
            is_inside = False
            rest = buffer[at + len(border) :]
            if rest[:2] == b"--":
                is_over = True
                break
            end = rest.find(b"\r\n\r\n")
            if end < 0:
                if len(rest) > MAX_HEAD_BYTES:
                    raise _broken("the headers of a part are too long")
                break
            num_parts += 1
            if num_parts > MAX_PARTS:
                raise _broken(f"it has more than {MAX_PARTS} parts")
            yield _part(bytes(rest[: end + 2]))
            del buffer[: at + len(border) + end + 4]
            is_inside = True
    if not is_over:
        raise _broken("it ends before its last boundary")


def _part(head: bytes) -> Part:
    disposition = next(
        (
            line
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-disposition:") and b"form-data" in line.lower()
        ),
        b"",
    )
    name, filename = _NAME.search(disposition), _FILENAME.search(disposition)
    if name is None:
        raise _broken("a part has no name")
    return Part(_text(name[1]), None if filename is None else _text(filename[1]))


def _text(raw: bytes) -> str:
    return re.sub(rb"\\(.)", rb"\1", raw).decode("utf-8", errors="replace")


def _broken(why: str) -> ApiError:
    return ApiError(400, f"the body is not a valid multipart form: {why}")
