"""Tools for models whose chat template has no tools, or writes calls in an unknown way.

The system message describes the tools and how to call one. Calls and results of earlier turns
become plain text in the roles that every template has:

    system     ... the available functions
    assistant  ... <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>
    user       <tool_response>\\n...\\n</tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmc.text.tools.tool_format import ToolFormat

GENERIC = ToolFormat(
    kind="object",
    section_begin="",
    call_begin="<tool_call>\n",
    call_end="\n</tool_call>",
    between="\n",
    section_end="",
    name_key="name",
    arguments_key="arguments",
)


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The prompt text that describes the functions to the model."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(
        (
            "You can call these functions:",
            *lines,
            "To call one, write its name and arguments like this, and nothing after it:",
            '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>',
        )
    )


def as_plain_turns(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, takes_system: bool
) -> list[dict[str, Any]]:
    """The conversation with calls, results and tools turned into plain text. Contents are strings
    or lists of parts. Without `takes_system` the first user message describes the tools."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = "\n".join(_call(call["function"]) for call in message["tool_calls"])
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            turns.append({**rest, "content": _joined(rest.get("content"), calls)})
        elif message.get("role") in ("tool", "function"):
            result = _joined("<tool_response>", message.get("content"), "\n")
            result = _joined(result, "</tool_response>", "\n")
            if turns and turns[-1].get("role") == "user" and turns[-1].get("is_result"):
                turns[-1]["content"] = _joined(turns[-1]["content"], result, "\n")
            else:
                turns.append({"role": "user", "content": result, "is_result": True})
        else:
            turns.append(message)
    turns = [{k: v for k, v in turn.items() if k != "is_result"} for turn in turns]
    if not tools:
        return turns
    text, role = describe_tools(tools), "system" if takes_system else "user"
    if turns and turns[0].get("role") == role:
        return [{**turns[0], "content": _joined(turns[0].get("content"), text)}, *turns[1:]]
    return [{"role": role, "content": text}, *turns]


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{GENERIC.call_begin}{json.dumps(call, ensure_ascii=False)}{GENERIC.call_end}"


def _joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Two contents as one: a string if both are, otherwise a list of parts."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
