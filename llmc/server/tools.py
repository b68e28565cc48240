"""The fields of a chat call about tools, and the calls in its answer.

tools, tool_choice, parallel_tool_calls -> ToolUse -> one parser for each choice of the answer
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.async_llm import AsyncLLM
from llmc.errors import InvalidRequestError
from llmc.server.protocol import ChatBody, ToolBody
from llmc.text.tokenizer import Tokenizer
from llmc.text.tools.parse import CallDelta, ToolParser
from llmc.text.tools.tool_format import ToolFormat

MAX_TOOL_BYTES = 1024 * 1024
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a call may do with tools, and the format in which the model does it."""

    form: ToolFormat
    tools: Sequence[Mapping[str, Any]]  # as the template takes them
    schemas: Mapping[str, Mapping[str, Any]]  # of the parameters, by the function's name
    parallel: bool

    def parser(self, *, streams: bool) -> ToolParser:
        return ToolParser(self.form, self.schemas, streams=streams, parallel=self.parallel)

    def shown_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that mark calls, so that the parser has to see them."""
        markers = self.form.marker_tokens(tokenizer.special_texts)
        return frozenset(tokenizer.hf.convert_tokens_to_ids(list(markers)))


async def tool_use(llm: AsyncLLM, body: ChatBody) -> ToolUse | None:
    """None for a call without tools. InvalidRequestError names the field that is wrong."""
    tools = template_tools(body.tools)
    choice = body.tool_choice if body.tool_choice is not None else "auto"
    name = _check_choice(choice, [tool["function"]["name"] for tool in tools])
    if not tools or choice == "none":
        return None
    if choice != "auto":
        raise InvalidRequestError(
            f"tool_choice {name or choice!r} is not supported by this server; use auto",
            param="tool_choice",
            code="unsupported_parameter",
        )
    form = await llm.check_tools(tools)
    schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
    return ToolUse(form=form, tools=tools, schemas=schemas, parallel=body.parallel_tool_calls)


def template_tools(given: Sequence[ToolBody] | None) -> list[dict[str, Any]]:
    """Tools as templates take them; checks what pydantic did not."""
    tools = [tool.model_dump(exclude_none=True) for tool in given or ()]
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}].function", tool["function"]
        if function["name"] in seen:
            raise InvalidRequestError(
                f"{where}.name is {function['name']!r}, as another tool's; give each its own",
                param=f"{where}.name",
            )
        seen.add(function["name"])
        kind = function.get("parameters", {}).get("type", "object")
        if kind != "object":
            raise InvalidRequestError(
                f"{where}.parameters must be the schema of an object, got type {kind!r:.80}",
                param=f"{where}.parameters",
            )
    size = len(json.dumps(tools))
    if size > MAX_TOOL_BYTES:
        raise InvalidRequestError(
            f"tools have {size} bytes; the limit is {MAX_TOOL_BYTES}", param="tools"
        )
    return tools


def _check_choice(choice: str | dict[str, Any], names: Sequence[str]) -> str | None:
    """The one function's name that is chosen, None for all other choices."""
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise InvalidRequestError(
                f"tool_choice must be {', '.join(CHOICES)} or a function, got {choice!r:.80}",
                param="tool_choice",
            )
        if choice == "required" and not names:
            raise InvalidRequestError("tool_choice required needs tools", param="tool_choice")
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidRequestError(
            'tool_choice must be {"type": "function", "function": {"name": "..."}}, '
            f"got {choice!r:.80}",
            param="tool_choice",
        )
    if name not in names:
        raise InvalidRequestError(
            f"tool_choice names {name!r:.80}, which tools has not; it has "
            f"{', '.join(names)[:200] or 'nothing'}",
            param="tool_choice",
        )
    return name


def delta_fields(call: CallDelta) -> dict[str, Any]:
    """One entry of a stream's `delta.tool_calls`."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def message_fields(use: ToolUse, text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Content and calls of a whole answer."""
    parser = use.parser(streams=False)
    deltas = (parser.push(text), parser.finish())
    content = "".join(delta.content for delta in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for delta in deltas for call in delta.calls):
        if call.name is not None:
            function = {"name": call.name, "arguments": ""}
            calls[call.index] = {"id": call.id, "type": "function", "function": function}
        calls[call.index]["function"]["arguments"] += call.arguments
    return (content or None) if calls else content, list(calls.values())
