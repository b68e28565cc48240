"""Request bodies of Anthropic's Messages API, and their translation to chat calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmc.errors import InvalidRequestError
from llmc.sampling_params import MAX_STOP_STRINGS
from llmc.server.protocol import MAX_TOOLS, Body, ChatBody, CountOrAll, Fraction, Temperature
from llmc.server.turn import apart, content_part, text_parts

TEXT = ("text",)
_OF_DOCUMENTS = ("title", "context")
_OF_SEARCH_RESULTS = ("title", "source")
ROLES = ("user", "assistant", "system")
# Fields of a ChatBody -> ours, for errors.
NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}


class MessagesTool(BaseModel):
    """A function that the model may call; Anthropic's server-side tools are rejected."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["custom"] | None = None  # first, so that an error about another type names it
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: Any = None
    strict: Any = None
    input_examples: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    allowed_callers: Any = None


class MessagesToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # required by the protocol; reasoning has no limit here
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    effort: str | None = None
    format: JsonFormat | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (None,),
        "mcp_servers": (None, []),
        "output_format": (None,),
        "speed": (None, "standard"),
        "inference_geo": (None,),
        "thread": (None,),
        "compaction": (None,),
        "fallbacks": (None,),
    }

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    # These do not change what is generated, so they are accepted and ignored.
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    metadata: Any = None
    service_tier: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    @property
    def shows_reasoning(self) -> bool:
        """False without `thinking`: clients then expect no thinking blocks."""
        return self._thinks and self.thinking is not None and self.thinking.display != "omitted"

    @property
    def _thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def chat(self, **sampling: Any) -> ChatBody:
        """The equivalent chat call. Raises InvalidRequestError that names the invalid field."""
        messages = [{"role": "system", "content": self._system()}] if self.system else []
        for index, message in enumerate(self.messages):
            messages += _messages(f"messages[{index}]", message)
        if self.tool_choice is not None and self.tool_choice.type == "any" and not self.tools:
            raise InvalidRequestError("tool_choice of type any needs tools", param="tool_choice")
        last = messages[-1]
        is_prefill = last["role"] == "assistant" and not last.get("tool_calls")
        choice = self.tool_choice
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "tools": self._tools(),
            "tool_choice": _choice(choice),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "continue_final_message": is_prefill,
            # Templates use either name.
            "chat_template_kwargs": {"enable_thinking": self._thinks, "thinking": self._thinks},
            **sampling,
        }
        config = self.output_config or OutputConfig()
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            described = {"name": "answer", "schema": config.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": described}
        return ChatBody.model_validate(fields, strict=True)

    def _system(self) -> str | list[dict[str, Any]]:
        return text_parts("system", self.system, TEXT)

    def _tools(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools or ()
        ]


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)]  # 0: only caches the prompt
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: CountOrAll | None = None
    stream: bool = False

    def chat(self, **sampling: Any) -> ChatBody:
        return super().chat(
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stream=self.stream,
            **sampling,
        )


def _choice(choice: MessagesToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError(
                "tool_choice of type tool needs the name of a tool", param="tool_choice.name"
            )
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _messages(where: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An Anthropic message as chat messages: each tool result becomes its own message."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {role!r:.80}",
            param=f"{where}.role",
        )
    if not isinstance(content, list):
        return [{"role": role, "content": text_parts(f"{where}.content", content, TEXT)}]
    made: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        here = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else block
        if kind == "tool_result" and role == "user":
            result, images = _tool_result(here, block)
            made.append(result)
            parts += images
        elif kind == "tool_use" and role == "assistant":
            calls.append(_tool_use(here, block))
        elif kind == "thinking" and role == "assistant":
            reasoning.append(_field(here, block, "thinking", str))
        elif not (kind == "redacted_thinking" and role == "assistant"):
            image_of = _image if role == "user" else None
            given = _as_text(here, block) if role == "user" else block
            parts.append(content_part(here, given, TEXT, image_of))
    said: dict[str, Any] = {"role": role, "content": parts}
    if reasoning:
        said["reasoning_content"] = "\n".join(reasoning)
    if calls:
        said["tool_calls"] = calls
    if parts or calls or not made:
        made.append(said)
    return made


def _as_text(where: str, block: Any) -> Any:
    """A document of plain text, or a search result, as a text block; any other block unchanged."""
    match block.get("type") if isinstance(block, dict) else None:
        case "document":
            texts = _document_texts(where, block)
        case "search_result":
            texts = [_field(where, block, name, str) for name in _OF_SEARCH_RESULTS]
            texts.append(_joined(f"{where}.content", _field(where, block, "content", list)))
        case _:
            return block
    _check_no_citations(where, block)
    return {"type": "text", "text": "\n\n".join(filter(None, texts))}


def _document_texts(where: str, block: Mapping[str, Any]) -> list[str]:
    """What a document says about itself, and its text."""
    source = _field(where, block, "source", dict)
    kind = source.get("type")
    if kind == "text":
        content = _field(f"{where}.source", source, "data", str)
    elif kind == "content":
        content = _joined(f"{where}.source.content", source.get("content"))
    else:
        raise InvalidRequestError(
            f"{where}.source.type must be text or content, got {kind!r:.80}: this server reads "
            "only documents of plain text; send the text of others",
            param=f"{where}.source.type",
        )
    about = [
        _field(where, block, name, str) for name in _OF_DOCUMENTS if block.get(name) is not None
    ]
    return [*about, content]


def _joined(where: str, content: Any) -> str:
    """A text, or the text of blocks that follow each other."""
    parts = text_parts(where, content, TEXT)
    return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)


def _check_no_citations(where: str, block: Mapping[str, Any]) -> None:
    if block.get("citations") is None:
        return
    enabled = _field(where, block, "citations", dict).get("enabled")
    if enabled is not None and enabled is not False:
        raise InvalidRequestError(
            f"{where}.citations can't be enabled: this server's answers have none",
            param=f"{where}.citations",
        )


def _image(where: str, block: Any) -> str | None:
    if not isinstance(block, dict) or block.get("type") != "image":
        return None
    source = _field(where, block, "source", dict)
    if source.get("type") == "url":
        return str(_field(f"{where}.source", source, "url", str))
    if source.get("type") != "base64":
        raise InvalidRequestError(
            f"{where}.source.type must be base64, got {source.get('type')!r:.80}",
            param=f"{where}.source.type",
        )
    kind = _field(f"{where}.source", source, "media_type", str)
    return f"data:{kind};base64,{_field(f'{where}.source', source, 'data', str)}"


def _tool_use(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = _field(where, block, "input", dict)
    name = _field(where, block, "name", str)
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _field(where, block, "id", str), "type": "function", "function": function}


def _tool_result(
    where: str, block: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result as a chat message, and its images, which chats have in the user's messages."""
    content = block.get("content")
    if isinstance(content, list):
        content = [
            _as_text(f"{where}.content[{index}]", part) for index, part in enumerate(content)
        ]
    given = text_parts(f"{where}.content", "" if content is None else content, TEXT, _image)
    said, images = apart(given)
    result = {
        "role": "tool",
        "tool_call_id": _field(where, block, "tool_use_id", str),
        "content": said,
    }
    return result, images


def _field(where: str, block: Mapping[str, Any], name: str, kind: type) -> Any:
    value = block.get(name)
    if not isinstance(value, kind):
        what = "a string" if kind is str else "a list" if kind is list else "an object"
        raise InvalidRequestError(
            f"{where}.{name} must be {what}, got {value!r:.80}", param=f"{where}.{name}"
        )
    return value
