"""The tool fields of a chat call, and the tool calls in its answer.

tools, tool_choice, parallel_tool_calls -> ToolUse -> one parser per choice of the answer
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.async_llm import AsyncLLM
from llmc.errors import InvalidRequestError
from llmc.frontend.inputs import Input
from llmc.server.protocol import ChatBody, ToolBody
from llmc.server.structured import grammar_from
from llmc.structured_outputs import StructuredOutputsParams
from llmc.text.tokenizer import Tokenizer
from llmc.text.tools.grammar import call_grammar
from llmc.text.tools.parse import CallDelta, ToolParser
from llmc.text.tools.tool_format import ToolFormat

MAX_TOOL_BYTES = 1024 * 1024
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Which tools a call may use, and the format in which the model calls them."""

    form: ToolFormat
    tools: Sequence[Mapping[str, Any]]  # in the form that templates expect
    schemas: Mapping[str, Mapping[str, Any]]  # of the parameters, by the function's name
    parallel: bool
    grammar: StructuredOutputsParams | None  # for an answer that must call a tool

    def parser(self, *, streams: bool) -> ToolParser:
        return ToolParser(self.form, self.schemas, streams=streams, parallel=self.parallel)

    def applied(self, source: Input, tokenizer: Tokenizer) -> Input:
        """The input with its call markers (special tokens) kept in the text, for the parser."""
        return source.showing(_marks(self.form, tokenizer).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The parsed tool_choice: whether the answer may or must call, and which functions."""

    mode: str  # one of CHOICES
    names: Sequence[str] | None = None  # None: all
    is_one: bool = False  # at most one call


async def tool_use(
    llm: AsyncLLM, body: ChatBody, answer: StructuredOutputsParams | None
) -> ToolUse | None:
    """The tool use of a call; None without tools. InvalidRequestError names the invalid field.

    `answer` is the grammar of an answer that calls no tool.
    """
    tools = template_tools(body.tools)
    choice = _choice(body.tool_choice, [tool["function"]["name"] for tool in tools])
    if not tools or choice.mode == "none":
        return None
    form = await llm.prepare.tools(tools)
    given = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
    schemas = given if choice.names is None else {name: given[name] for name in choice.names}
    parallel = body.parallel_tool_calls and not choice.is_one
    grammar = None
    if choice.mode == "required" or answer is not None:
        schema = None if choice.mode == "required" else _schema_of(answer)
        marks = _marks(form, llm.inputs.need_tokenizer("tools"))
        with grammar_from("tools"):
            strict = {tool.function.name for tool in body.tools or () if tool.function.strict}
            text = call_grammar(
                form, schemas, marks, parallel=parallel, answer=schema, strict=strict
            )
            grammar = StructuredOutputsParams(grammar=text)
    return ToolUse(form=form, tools=tools, schemas=schemas, parallel=parallel, grammar=grammar)


def _schema_of(answer: StructuredOutputsParams | None) -> str | None:
    if answer is not None and answer.kind not in ("json", "json_object"):
        raise InvalidRequestError(
            f"tools can be combined with a JSON answer, not with a {answer.kind}; leave one of "
            "them out, or set tool_choice to none",
            param="tools",
        )
    return None if answer is None else answer.text


def template_tools(given: Sequence[ToolBody] | None) -> list[dict[str, Any]]:
    """Tools in the form that templates expect; checks what pydantic did not."""
    tools = [tool.model_dump(exclude_none=True) for tool in given or ()]
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}].function", tool["function"]
        if function["name"] in seen:
            raise InvalidRequestError(
                f"{where}.name is {function['name']!r}, like another tool's; names must be unique",
                param=f"{where}.name",
            )
        seen.add(function["name"])
        # Templates use these fields without checking that they exist.
        function.setdefault("description", "")
        parameters = function.setdefault("parameters", {"type": "object", "properties": {}})
        kind = parameters.get("type", "object")
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


def _marks(form: ToolFormat, tokenizer: Tokenizer) -> dict[str, int]:
    """The format's special tokens, with their ids."""
    texts = list(form.marker_tokens(tokenizer.special_texts))
    return dict(zip(texts, tokenizer.ids_of(texts), strict=True))


def _choice(given: str | dict[str, Any] | None, names: Sequence[str]) -> Choice:
    if given is None:
        return Choice(mode="auto")
    if isinstance(given, str):
        if given not in CHOICES:
            raise InvalidRequestError(
                f"tool_choice must be {', '.join(CHOICES)} or a function, got {given!r:.80}",
                param="tool_choice",
            )
        if given == "required" and not names:
            raise InvalidRequestError("tool_choice required needs tools", param="tool_choice")
        return Choice(mode=given)
    if given.get("type") == "allowed_tools":
        return _allowed(given.get("allowed_tools"), names)
    return Choice(mode="required", names=[_function(given, names)], is_one=True)


def _allowed(given: Any, names: Sequence[str]) -> Choice:
    """Allow only some tools. The prompt still lists all, so that its cached prefix stays valid."""
    mode = given.get("mode") if isinstance(given, dict) else None
    tools = given.get("tools") if isinstance(given, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequestError(
            'tool_choice of type allowed_tools must have {"mode": "auto" or "required", "tools": '
            f"[...]}}, got {given!r:.80}",
            param="tool_choice.allowed_tools",
        )
    return Choice(mode=mode, names=[_function(tool, names) for tool in tools])


def _function(given: Any, names: Sequence[str]) -> str:
    """The name of the chosen function, which must be among the tools."""
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or given.get("type") != "function":
        raise InvalidRequestError(
            'tool_choice must be {"type": "function", "function": {"name": "..."}}, '
            f"got {given!r:.80}",
            param="tool_choice",
        )
    if name not in names:
        raise InvalidRequestError(
            f"tool_choice names {name!r:.80}, which is not among the tools "
            f"({', '.join(names)[:200] or 'there are none'})",
            param="tool_choice",
        )
    return name


def delta_fields(call: CallDelta) -> dict[str, Any]:
    """One entry of a stream's `delta.tool_calls`."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
