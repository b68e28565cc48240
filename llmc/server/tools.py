"""The fields of a chat call about tools, and the calls in its answer.

tools, tool_choice, parallel_tool_calls -> ToolUse -> one parser for each choice of the answer
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmc.async_llm import AsyncLLM
from llmc.errors import InvalidRequestError
from llmc.frontend.inputs import Input
from llmc.server.protocol import ChatBody, ToolBody
from llmc.structured_outputs import StructuredOutputs
from llmc.text.tokenizer import Tokenizer
from llmc.text.tools.grammar import call_grammar
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
    grammar: StructuredOutputs | None  # of an answer that must call

    def parser(self, *, streams: bool) -> ToolParser:
        return ToolParser(self.form, self.schemas, streams=streams, parallel=self.parallel)

    def applied(self, source: Input, tokenizer: Tokenizer) -> Input:
        """With the special tokens that mark calls in the text, so that the parser sees them."""
        return source.showing(_marks(self.form, tokenizer).values())


async def tool_use(llm: AsyncLLM, body: ChatBody) -> ToolUse | None:
    """None for a call without tools. InvalidRequestError names the field that is wrong."""
    tools = template_tools(body.tools)
    choice = body.tool_choice if body.tool_choice is not None else "auto"
    name = _check_choice(choice, [tool["function"]["name"] for tool in tools])
    if not tools or choice == "none":
        return None
    form = await llm.check_tools(tools)
    given = body.tools or ()
    schemas = {tool.function.name: tool.function.parameters or {} for tool in given}
    parallel = body.parallel_tool_calls and name is None
    grammar = None
    if choice != "auto":
        marks = _marks(form, llm.inputs.need_tokenizer("tools"))
        wanted = schemas if name is None else {name: schemas[name]}
        with blaming_tools():
            text = call_grammar(form, wanted, marks, parallel=parallel)
            grammar = StructuredOutputs(grammar=text)
    return ToolUse(form=form, tools=tools, schemas=schemas, parallel=parallel, grammar=grammar)


@contextmanager
def blaming_tools() -> Iterator[None]:
    """Errors about the grammar of an answer that must call name the field that it comes from."""
    try:
        yield
    except InvalidRequestError as exc:
        if (exc.param or "").startswith("structured_outputs"):
            text = str(exc).replace(str(exc.param), "tools", 1)
            raise InvalidRequestError(text, param="tools", code=exc.code) from exc
        raise


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
        # Templates ask for these without asking whether they are there.
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
    return dict(zip(texts, tokenizer.hf.convert_tokens_to_ids(texts), strict=True))


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
