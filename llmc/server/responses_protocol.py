"""Request bodies of OpenAI's Responses API, and their translation to chat calls."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmc.engine.admission import MAX_CACHE_SALT
from llmc.errors import InvalidRequestError
from llmc.sampling_params import MAX_LOGPROBS
from llmc.server.protocol import (
    MAX_TOOLS,
    Body,
    ChatBody,
    Count,
    CountOrAll,
    Fraction,
    Int64,
    StreamOptions,
    Temperature,
)
from llmc.server.turn import apart, content_part, text_parts

TEXT = ("input_text", "output_text", "text")
ROLES = ("user", "assistant", "system", "developer")
# Fields of a ChatBody -> ours, for errors.
NAMES = {
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
}
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")  # we have none of the latter


class ResponsesTool(BaseModel):
    """A function that the model may call; OpenAI's built-in tools are rejected."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    effort: str | None = None
    summary: Any = None  # ignored: reasoning is shown in full
    generate_summary: Any = None


class ResponsesBody(Body):
    """POST /v1/responses."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (None, False),
        "conversation": (None,),
        "prompt": (None,),
        "max_tool_calls": (None,),
        "truncation": (None, "disabled", "auto"),  # nothing is cut: too long an input is refused
        "context_management": (None,),
        "moderation": (None,),
        "image": (None,),
    }

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: CountOrAll | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningConfig | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    store: bool = True
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Int64 = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None

    # These do not change what is generated, so they are accepted and ignored.
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    service_tier: Any = None
    client_metadata: Any = None

    def chat(self, before: Sequence[Mapping[str, Any]]) -> ChatBody:
        """The equivalent chat call. `before`: the messages up to the previous response."""
        for index, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                raise InvalidRequestError(
                    f"include[{index}] is {name!r:.80}, which is not supported by this server",
                    param=f"include[{index}]",
                )
        said = [*before, *self.messages()]
        if self.instructions is not None:
            said.insert(0, {"role": "system", "content": self.instructions})
        fields = {
            "model": self.model,
            "messages": said,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "tools": self._tools(),
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "stream": self.stream,
            "logprobs": self.num_logprobs is not None,
            "top_logprobs": self.num_logprobs,
        }
        return ChatBody.model_validate(fields, strict=True)

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives of each token to return; None: no log-probabilities."""
        return self.top_logprobs or (0 if LOGPROBS in (self.include or ()) else None)

    def messages(self) -> list[dict[str, Any]]:
        """The input as chat messages. The reasoning, text and calls of one answer are merged into
        one message."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        made: list[dict[str, Any]] = []
        seen: list[dict[str, Any]] = []  # images of outputs, for the user's next message
        for index, item in enumerate(self.input):
            message = _message(f"input[{index}]", item)
            if message["role"] == "tool":
                message["content"], images = apart(message["content"])
                seen += images
            elif seen:
                message = _with_images(seen, message, made)
                seen = []
            last = made[-1] if made else {}
            if message["role"] == last.get("role") == "assistant" and _continues(last, message):
                made[-1] = _merged(last, message)
            else:
                made.append(message)
        return [*made, {"role": "user", "content": seen}] if seen else made

    def items(self) -> list[dict[str, Any]]:
        """The input as items with ids, whose contents are lists of parts."""
        if isinstance(self.input, str):
            return [_whole_item({"role": "user", "content": self.input})]
        return [_whole_item(item) for item in self.input]

    def _tools(self) -> list[dict[str, Any]]:
        return [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools or ()
        ]

    def _choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if isinstance(choice, dict) and set(choice) == {"type", "name"}:
            return {"type": choice["type"], "function": {"name": choice["name"]}}
        if isinstance(choice, dict) and isinstance(choice.get("tools"), list):
            tools = [_named_tool(tool) for tool in choice["tools"]]
            allowed = {"mode": choice.get("mode"), "tools": tools}
            return {"type": choice.get("type"), "allowed_tools": allowed}
        return choice

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        if form is None:
            return None
        if form.type != "json_schema":
            return {"type": form.type}
        described = {"name": form.name, "schema": form.schema_, "strict": form.strict}
        return {"type": form.type, "json_schema": described}


def _whole_item(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}.get(
        kind, "rs"
    )
    made = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "completed", **item}
    if kind == "message" and isinstance(made.get("content"), str):
        said = "output_text" if made.get("role") == "assistant" else "input_text"
        made["content"] = [{"type": said, "text": made["content"]}]
    return made


def _named_tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    return {"type": tool.get("type"), "function": {"name": tool.get("name")}}


def _message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    match kind:
        case "message":
            return _plain(where, item)
        case "function_call":
            function = {name: _text(where, item, name) for name in ("name", "arguments")}
            call = {"id": _text(where, item, "call_id"), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            output = text_parts(f"{where}.output", item.get("output"), TEXT, _image)
            call_id = _text(where, item, "call_id")
            return {"role": "tool", "tool_call_id": call_id, "content": output}
        case "reasoning":
            return {"role": "assistant", "reasoning_content": _reasoning(where, item)}
    raise InvalidRequestError(
        f"{where} has type {kind!r:.80}; this server accepts message, function_call, "
        "function_call_output, reasoning and item_reference",
        param=where,
    )


def _plain(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {role!r:.80}",
            param=f"{where}.role",
        )
    here = f"{where}.content"
    if isinstance(content, list):
        parts = []
        for index, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") == "refusal":
                part = {"type": "text", "text": part.get("refusal")}
            image_of = _image if role == "user" else None
            parts.append(content_part(f"{here}[{index}]", part, TEXT, image_of))
        return {"role": role, "content": parts}
    return {"role": role, "content": text_parts(here, content, TEXT)}


def _image(where: str, part: Any) -> str | None:
    if not isinstance(part, dict) or part.get("type") != "input_image":
        return None
    url = part.get("image_url")
    if not isinstance(url, str):
        raise InvalidRequestError(
            f"{where}.image_url must be a data URL, got {url!r:.80} (file_id is not supported)",
            param=where,
        )
    return url


def _with_images(
    images: list[dict[str, Any]], message: dict[str, Any], made: list[dict[str, Any]]
) -> dict[str, Any]:
    """The message after a tool's images: with them if it is the user's, otherwise after a message
    of them, which is added to `made`."""
    if message["role"] != "user":
        made.append({"role": "user", "content": images})
        return message
    content = message["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [*images, *text]}


def _reasoning(where: str, item: Mapping[str, Any]) -> str:
    """The item's content, or its summary if it has none."""
    found = ""
    for name in ("summary", "content"):
        parts = [] if item.get(name) is None else item[name]
        made = text_parts(f"{where}.{name}", parts, ("reasoning_text", "summary_text"))
        text = made if isinstance(made, str) else "\n".join(part["text"] for part in made)
        found = text or found
    return found


def _continues(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether two consecutive messages are one answer: reasoning, then text, then calls."""
    order = ("reasoning_content", "content", "tool_calls")
    done = max(index for index, part in enumerate(order) if part in last)
    begins = min(index for index, part in enumerate(order) if part in message)
    return begins > done or (begins == done and order[begins] == "tool_calls")


def _merged(last: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
    return {**last, **message, **({"tool_calls": calls} if calls else {})}


def _text(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(
            f"{where}.{name} must be text, got {value!r:.80}", param=f"{where}.{name}"
        )
    return value
