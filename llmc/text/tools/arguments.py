"""Values of arguments, as models write them -> JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


def decoded(text: str) -> Any:
    """The value of a JSON text, or None where it is none (or null, which nothing here asks for)."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def from_literal(text: str) -> str | None:
    """A value as JSON or Python writes it, as JSON; None for anything else."""
    text = _OF_PYTHON.get(text, text)
    return text if text == "null" or decoded(text) is not None else None


def from_text(text: str, schema: object) -> str:
    """A value that stands without quotes, as JSON. Where the schema allows nothing but texts it is
    one; elsewhere it is read as JSON, and is a text where it is none."""
    if not is_text(schema):
        written = from_literal(text.strip())
        if written is not None:
            return written
    return json.dumps(text, ensure_ascii=False)


def is_text(schema: object) -> bool:
    """Whether the schema allows texts alone (or nothing)."""
    if not isinstance(schema, Mapping):
        return False
    kind: Any = schema.get("type")
    if kind is None:
        choices = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
        return bool(choices) and all(isinstance(one, str) for one in choices)
    if isinstance(kind, list):
        return "string" in kind and set(kind) <= {"string", "null"}
    return bool(kind == "string")


def _refuse(name: str) -> None:
    raise ValueError(name)
