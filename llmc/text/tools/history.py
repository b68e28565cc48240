"""Converts the calls in a conversation's messages to the form that a template expects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmc.errors import InvalidRequestError
from llmc.text.tools.arguments import decoded


def with_arguments(where: str, message: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """The message with the JSON arguments of its calls parsed (or kept as text, if `as_text`)."""
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if not isinstance(calls, list | tuple):
        raise _fail(f"{where}.tool_calls", f"must be a list of calls, got {calls!r:.80}")
    made = [_call(f"{where}.tool_calls[{i}]", call, as_text) for i, call in enumerate(calls)]
    return {**message, "tool_calls": made}


def _call(where: str, call: Any, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _fail(f"{where}.function", "must have a name and arguments")
    name, given = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise _fail(f"{where}.function.name", f"must be a function's name, got {name!r:.80}")
    arguments = decoded(given or "{}") if isinstance(given, str | None) else given
    if not isinstance(arguments, Mapping):
        raise _fail(
            f"{where}.function.arguments", f"must be a JSON object as a string, got {given!r:.80}"
        )
    if as_text:
        text = given if isinstance(given, str) and given else json.dumps(arguments)
        return {**call, "function": {**function, "arguments": text}}
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _fail(param: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {rule}", param=param)
