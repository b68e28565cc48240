"""Request bodies: supported fields, fields accepted without effect, and unsupported fields.

A field that is not listed is rejected by name, and so is a known field that llmc does not support:
ignoring it silently would give a wrong answer. Nulls count as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from llmc.engine.admission import MAX_CACHE_SALT
from llmc.sampling_params import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_N
from llmc.server.errors import ApiError

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
CountOrAll = Annotated[int, Field(ge=-1, le=2**31 - 1)]  # -1: all
Fraction = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

# Of an answer. -1: until the context is full, as some other servers have it.
MaxTokens = Annotated[int, Field(ge=1, le=2**31 - 1)] | Literal[-1]

MAX_TOOLS = 128
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"
MAX_DOCUMENTS = 1024

# Texts that the chat template shows the model, such as {"title": ..., "text": ...}.
Documents = Annotated[list[dict[str, str]], Field(max_length=MAX_DOCUMENTS)]

_OFF: tuple[Any, ...] = (None, 0, 0.0)
_BELOW_OFF: tuple[Any, ...] = (*_OFF, -1, -1.0)
_ONE_IS_OFF: tuple[Any, ...] = (None, 1, 1.0)
# Samplers of ggml's server that llmc does not have, with the values that turn them off.
SAMPLERS_OFF: Mapping[str, tuple[Any, ...]] = {
    "dynatemp_range": _OFF,
    "typical_p": _ONE_IS_OFF,
    "tfs_z": _ONE_IS_OFF,
    "top_n_sigma": _BELOW_OFF,
    "mirostat": _OFF,
    "dry_multiplier": _OFF,
    "xtc_probability": _OFF,
    "adaptive_target": _BELOW_OFF,
}
# Known fields that llmc does not support, with the values that have no effect.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **SAMPLERS_OFF,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "moderation": (None,),
    "web_search_options": (None,),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "prompt_embeds": (None,),
    "chat_template": (None,),
    "documents": (None,),
    "thinking_token_budget": (None,),
    "logprob_token_ids": (None,),
    "echo": (None, False),
    "add_special_tokens": (None, False),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "kv_transfer_params": (None, {}),
    "reasoning_format": (None, "auto"),
    "length_penalty": (None, 1, 1.0),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
}


def whole(value: Any) -> Any:
    """The value, as an int if it is whole: JSON has no integers of its own, and some clients send
    them as 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Body(BaseModel):
    """The base of all bodies: strict types, finite numbers, no unknown fields."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        """Drop nulls and unsupported fields without effect; reject the other unsupported ones."""
        kept = {}
        for name, value in data.items():
            if name in cls.UNSUPPORTED and name not in cls.model_fields:
                if not any(
                    type(value) is type(neutral) and value == neutral
                    for neutral in cls.UNSUPPORTED[name]
                ):
                    raise ApiError(
                        400,
                        f"{name} is not supported by this server; leave it out",
                        param=name,
                        code="unsupported_parameter",
                    )
            elif value is not None:
                kept[name] = whole(value)
        return kept


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # accepted and ignored: we never pad the stream


class StructuredOutputsBody(BaseModel):
    """Exactly one of these fields; llmc.structured_outputs validates their values."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    additional_properties: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        """Drop nulls, and vLLM's options that ask for nothing."""
        if not isinstance(data, dict):
            return data
        free = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
        return {
            name: value
            for name, value in data.items()
            if value is not None and not (name in free and value is False)
        }


class GenerationBody(Body):
    """Fields shared by chat and plain completions. Unset ones use the model's defaults."""

    SAMPLING_FIELDS: ClassVar[tuple[str, ...]] = (
        *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "repeat_last_n", "seed", "stop"),
        *("stop_token_ids",),
        *("ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "allowed_token_ids", "bad_words", "prompt_logprobs"),
        *("truncate_prompt_tokens", "extra_args"),
    )

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: CountOrAll | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = Field(
        default=None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    repeat_last_n: CountOrAll | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=65536)] | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    extra_args: dict[str, Any] | None = Field(
        default=None, validation_alias=AliasChoices("extra_args", "vllm_xargs")
    )
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: Any = None  # there is one
    json_schema: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    priority: Int64 = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    # These do not change what is generated, so they are accepted and ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    cache_prompt: Any = None
    id_slot: Any = None
    timings_per_token: Any = None
    return_progress: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                400,
                "prompt_logprobs can't be streamed; leave stream out",
                param="prompt_logprobs",
            )
        return self


class LoadAdapterBody(BaseModel):
    """An adapter to load; its path is relative to --runtime-lora-dir, or absolute inside it."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False  # replaces the adapter of this name, if there is one


class UnloadAdapterBody(BaseModel):
    model_config = ConfigDict(extra="ignore")  # clients send the adapter's number too

    lora_name: str


class FunctionBody(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: FunctionBody


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[Any]
    max_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    suffix: str | None = None
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(
                400, "max_tokens 0 needs echo=true, which returns the prompt", param="max_tokens"
            )
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool = True
    thinking_token_budget: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    verbosity: Any = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives of each token to return; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TemplateBody(Body):
    """Messages that are only rendered with the chat template."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None


class TokenizeBody(TemplateBody):
    """POST /tokenize: a prompt, or messages. `content` and the fields below it are those of ggml's
    server, which answers with nothing but the tokens."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    content: str | None = None
    add_special: bool = False
    parse_special: Literal[True] = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[TokenId]
