"""A tool format given by the user (`--tool-format`)."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from llmc.errors import ConfigError
from llmc.text.tools.generic import GENERIC
from llmc.text.tools.learn import is_sound
from llmc.text.tools.tool_format import ToolFormat

AUTO = "auto"
MAX_BYTES = 64 * 1024
_KINDS = ("object", "named", "keyed")
_DEFAULTS = {
    "section_begin": "", "call_begin": "", "call_end": "", "between": "", "section_end": "",
    "name_key": "name", "arguments_key": "arguments",
}  # fmt: skip
_NEEDS = {
    "named": "a mark before the name (section_begin, call_begin) and one after it (middle)",
    "keyed": "a mark before the name (section_begin, call_begin), key_end, value_end unless "
    "values_are_json, and an end (call_end, section_end)",
}


def read_tool_format(given: str) -> ToolFormat | None:
    """Parse the option: "auto" (returns None: the format is learned), "generic", the fields of a
    ToolFormat in JSON, or a file with these. ConfigError if it is invalid."""
    if given == AUTO:
        return None
    if given == "generic":
        return GENERIC
    text = given if given.lstrip().startswith("{") else _read(Path(given).expanduser())
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"the tool format is not valid JSON: {str(e)[:200]}") from e
    if not isinstance(found, dict):
        raise ConfigError(f"the tool format must be a JSON object, got {found!r:.80}")
    known = {field.name: field.type for field in fields(ToolFormat)}
    if unknown := sorted(found.keys() - known):
        raise ConfigError(
            f"the tool format has unknown fields: {', '.join(unknown)[:200]}; known ones are "
            f"{', '.join(known)}"
        )
    for name, value in found.items():
        _check(name, value, str(known[name]))
    if found.get("kind") not in _KINDS:
        raise ConfigError(
            f"kind of the tool format must be one of {', '.join(_KINDS)}, got {found.get('kind')!r}"
        )
    form = ToolFormat(**{**_DEFAULTS, **found})
    if not is_sound(form):
        raise ConfigError(f"a tool format of kind {form.kind} needs {_NEEDS[form.kind]}")
    return form


def _check(name: str, value: Any, kind: str) -> None:
    if kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{name} of the tool format must be true or false, got {value!r:.80}")
    elif not isinstance(value, str) and not (value is None and "None" in kind):
        raise ConfigError(f"{name} of the tool format must be a string, got {value!r:.80}")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ConfigError(f"the tool format {path} has more than {MAX_BYTES} bytes")
        return text.decode()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"the tool format {str(path)!r} can't be read ({e}); pass auto, generic, a JSON object "
            "or a file with one"
        ) from e
