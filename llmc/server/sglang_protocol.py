"""The body of SGLang's /generate, and its translation to plain completions.

https://docs.sglang.ai/basic_usage/sampling_params.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llmc.errors import InvalidRequestError
from llmc.sampling_params import MAX_LOGPROBS, MAX_N
from llmc.server.protocol import (
    Body,
    CompletionBody,
    Count,
    CountOrAll,
    Fraction,
    Int64,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TokenId,
    whole,
)
from llmc.server.settings import MAX_PROMPTS

DEFAULT_MAX_TOKENS = 128
# Fields of a CompletionBody -> those they come from, for errors.
NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "logprobs": "top_logprobs_num",
    **{
        name: f"sampling_params.{name}"
        for name in ("stop", "stop_token_ids", "logit_bias", "json_schema", "regex", "ebnf", "n")
    },
}


class SamplingBody(BaseModel):
    """The sampling parameters. Unset ones use the model's own defaults."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    max_new_tokens: Count | None = DEFAULT_MAX_TOKENS  # None: until the context is full
    min_new_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: CountOrAll | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    sampling_seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    ebnf: str | None = None

    # without effect
    spaces_between_special_tokens: Any = None
    stream_interval: Any = None

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: whole(value) for name, value in data.items()}

    def completion(self, given: SglangBody) -> CompletionBody:
        """The equivalent plain completion, without its prompt."""
        fields = self.model_dump(
            exclude={
                *("max_new_tokens", "min_new_tokens", "sampling_seed", "no_stop_trim"),
                *("spaces_between_special_tokens", "stream_interval"),
            },
            exclude_none=True,
        )
        fields |= {
            "model": given.lora_path or given.model,
            "prompt": [0],
            "min_tokens": self.min_new_tokens,
            "seed": self.sampling_seed,
            "include_stop_str_in_output": self.no_stop_trim,
            "stream": given.stream,
        }
        return CompletionBody.model_validate(fields, strict=True)


class SglangBody(Body):
    """POST /generate."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "input_embeds": (None,),
        "image_data": (None, []),
        "video_data": (None, []),
        "audio_data": (None, []),
        "token_ids_logprob": (None, []),
        "return_hidden_states": (None, False),
        "custom_logit_processor": (None,),
        "session_params": (None,),
    }

    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SamplingBody | list[SamplingBody] = SamplingBody()
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    lora_path: str | None = None
    priority: Int64 = 0

    # without effect
    rid: Any = None
    log_metrics: Any = None

    @property
    def is_several(self) -> bool:
        """Whether the response is a list."""
        has_list = isinstance(self.text, list) or self._has_id_lists
        one = self.sampling_params
        return has_list or (isinstance(one, SamplingBody) and one.n > 1)

    @property
    def _has_id_lists(self) -> bool:
        return bool(self.input_ids) and isinstance((self.input_ids or [0])[0], list)

    def prompts(self) -> list[str | list[int]]:
        """The texts or lists of token ids, whose values are not checked yet."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequestError("send either text or input_ids", param="text")
        if self.text is not None:
            return [self.text] if isinstance(self.text, str) else list(self.text)
        ids = self.input_ids or []
        if not ids:
            raise InvalidRequestError("input_ids must not be an empty list", param="input_ids")
        if not self._has_id_lists:
            return [ids]
        if len(ids) > MAX_PROMPTS or not all(isinstance(one, list) for one in ids):
            raise InvalidRequestError(
                f"input_ids must be a list of token ids, or of at most {MAX_PROMPTS} such lists",
                param="input_ids",
            )
        return ids

    def sampling(self, count: int) -> list[SamplingBody]:
        """The sampling parameters of each prompt."""
        given = self.sampling_params
        if isinstance(given, SamplingBody):
            return [given] * count
        if len(given) != count:
            raise InvalidRequestError(
                f"{len(given)} sampling_params for {count} prompts; send one, or one for each",
                param="sampling_params",
            )
        if len({one.n for one in given}) > 1:
            raise InvalidRequestError(
                "all sampling_params of a call need the same n", param="sampling_params.n"
            )
        return given
