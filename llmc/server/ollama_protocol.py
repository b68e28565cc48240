"""Request bodies of Ollama's API, and their translation to chat calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llmc.errors import InvalidRequestError
from llmc.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS
from llmc.server.errors import ApiError
from llmc.server.pooling_protocol import MAX_INPUTS
from llmc.server.protocol import (
    MAX_TOOLS,
    Body,
    ChatBody,
    CountOrAll,
    Fraction,
    Int64,
    Penalty,
    RepetitionPenalty,
    Temperature,
    ToolBody,
)

# Fields of a ChatBody -> ours, for errors.
NAMES = {
    "response_format": "format",
    "max_tokens": "options.num_predict",
    **{name: f"options.{name}" for name in ("stop", "temperature", "top_p", "top_k", "seed")},
}
# Options of Ollama's runner that are ignored (FREE) or must have a neutral value (NEUTRAL).
FREE = frozenset(
    (
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa"),
        *("use_mmap", "use_mlock", "low_vram", "f16_kv", "vocab_only", "logits_all"),
        *("mirostat_tau", "mirostat_eta", "penalize_newline"),
    )
)
NEUTRAL: Mapping[str, float] = {
    "mirostat": 0,
    "tfs_z": 1,
    "typical_p": 1,
}

StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class OllamaOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    num_predict: (
        Annotated[int, Field(ge=-2, le=2**31 - 1, json_schema_extra={"not": {"const": 0}})] | None
    ) = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: CountOrAll | None = None
    min_p: Fraction | None = None
    seed: Int64 | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: CountOrAll | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None:
                continue
            if name in NEUTRAL and (isinstance(value, bool) or value != NEUTRAL[name]):
                raise ApiError(
                    400,
                    f"options.{name} is not supported by this server; leave it out",
                    param=f"options.{name}",
                    code="unsupported_parameter",
                )
            if name == "num_predict" and value == 0 and not isinstance(value, bool):
                raise InvalidRequestError(
                    "options.num_predict must be at least 1, or -1 for all that fits, got 0",
                    param="options.num_predict",
                )
            if name not in FREE and name not in NEUTRAL:
                kept[name] = value
        return kept

    def fields(self) -> dict[str, Any]:
        """The options under a ChatBody's names."""
        given = self.model_dump(exclude={"num_predict", "repeat_penalty"}, exclude_none=True)
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        if self.num_predict is not None and self.num_predict >= 0:  # negative: no limit
            given["max_tokens"] = self.num_predict
        return given


class OllamaBody(Body):
    """The fields shared by chat and generate. They stream by default."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "template": (None, ""),
        "context": (None, []),
        "images": (None, []),
    }

    stream: bool = True
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    keep_alive: Any = None  # ignored: the model stays loaded
    truncate: Any = None  # ignored, as is `shift`: nothing is cut, too long a prompt is refused
    shift: Any = None

    @property
    def shows_reasoning(self) -> bool:
        return self.think is not False

    def chat_of(self, messages: list[dict[str, Any]], **rest: Any) -> ChatBody:
        """The equivalent chat call for these messages."""
        fields: dict[str, Any] = {
            **(self.options.fields() if self.options is not None else {}),
            "model": self.model and self.model.removesuffix(":latest"),
            "messages": messages,
            "stream": self.stream,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            **rest,
        }
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            described = {"name": "answer", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": described}
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        if self.think is not None:
            thinks = self.think is not False
            # Templates use either name.
            fields["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
        return ChatBody.model_validate(fields, strict=True)


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None

    def chat(self) -> ChatBody:
        messages = [_message(f"messages[{i}]", one) for i, one in enumerate(self.messages)]
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return self.chat_of(messages, tools=tools)


class GenerateBody(OllamaBody):
    """POST /api/generate."""

    prompt: str = ""
    images: list[str] | None = None  # base64
    suffix: str | None = None
    system: str | None = None
    raw: bool = False

    def chat(self) -> ChatBody:
        if self.images and (self.raw or self.suffix):
            raise InvalidRequestError(
                "images need a prompt that is rendered as a chat; leave out raw and suffix",
                param="images",
            )
        content = _with_images("images", self.images, self.prompt) if self.images else self.prompt
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return self.chat_of(messages)


class EmbedBody(Body):
    """POST /api/embed."""

    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)] = ""
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    options: OllamaOptions | None = None  # ignored: they don't affect embeddings
    keep_alive: Any = None

    @property
    def texts(self) -> list[str]:
        return [self.input] * bool(self.input) if isinstance(self.input, str) else self.input


class OldEmbedBody(Body):
    """POST /api/embeddings."""

    prompt: str = ""
    options: OllamaOptions | None = None
    keep_alive: Any = None


class ShowBody(Body):
    """POST /api/show."""

    name: str | None = None  # older name of `model`
    verbose: Any = None


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """An Ollama message as a chat message: its calls have no ids, and results name the tool."""
    made = {key: value for key, value in message.items() if key not in ("images", "tool_name")}
    if made.get("role") == "tool":
        name = message.get("tool_name")
        made.setdefault("tool_call_id", "")
        if name is not None:
            made["name"] = name
    images = message.get("images")
    if images not in (None, []):
        made["content"] = _with_images(f"{where}.images", images, made.get("content"))
    calls = made.get("tool_calls")
    if isinstance(calls, list):
        made["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", **call} if isinstance(call, dict) else call
            for i, call in enumerate(calls)
        ]
    return made


def _with_images(where: str, images: Any, content: Any) -> list[dict[str, Any]]:
    """Content parts of a chat message: base64 images first, then the text."""
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InvalidRequestError(
            f"{where} must be a list of base64 images, got {images!r:.80}", param=where
        )
    urls = [{"url": f"data:image;base64,{image}"} for image in images]
    text = [{"type": "text", "text": content}] if isinstance(content, str) and content else []
    return [*({"type": "image_url", "image_url": url} for url in urls), *text]
