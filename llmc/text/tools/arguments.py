"""Argument values, as models write them -> JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
_LITERALS = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\b(?:True|False|None)\b""", re.DOTALL
)
_ESCAPES = re.compile(r'\\(["\\/bfnrtu])|\\(.)|"', re.DOTALL)


def decoded(text: str) -> Any:
    """The value of a JSON text; None if it is invalid (or null, which no caller needs)."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def from_literal(text: str) -> str | None:
    """A JSON or Python literal as JSON; None for anything else."""
    for written in (text, _LITERALS.sub(_as_json, text)):
        if written == "null" or decoded(written) is not None:
            return written
    return None


def _as_json(literal: re.Match[str]) -> str:
    """A Python literal as JSON; a JSON string is unchanged."""
    text = literal[0]
    if text[0] != "'":
        return _OF_PYTHON.get(text, text)
    return f'"{_ESCAPES.sub(_escaped, text[1:-1])}"'


def _escaped(found: re.Match[str]) -> str:
    if found[1]:
        return found[0]
    if found[2]:  # \' is an apostrophe; escapes that JSON does not have keep their backslash
        return "'" if found[2] == "'" else "\\\\" + found[2]
    return '\\"'


def from_text(text: str, schema: object) -> str:
    """An unquoted value as JSON. If the schema allows only strings, it is one; otherwise it is
    parsed as JSON, and is a string if that fails."""
    if not is_text(schema):
        written = from_literal(text.strip())
        if written is not None:
            return written
    return json.dumps(text, ensure_ascii=False)


def is_text(schema: object) -> bool:
    """Whether the schema allows only strings (or null)."""
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
