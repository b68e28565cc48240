"""Request bodies of the API of ggml's HTTP server, and their translation to plain completions.

https://github.com/ggml-org has its description, in the README of the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from llmc.errors import InvalidRequestError
from llmc.sampling_params import MAX_LOGPROBS, MAX_N
from llmc.server.pooling_protocol import InputBody
from llmc.server.protocol import (
    SAMPLERS_OFF,
    Body,
    CompletionBody,
    CountOrAll,
    Fraction,
    Int64,
    Penalty,
    RepetitionPenalty,
    TemplateBody,
)

# Fields of a CompletionBody -> those they come from, for errors.
NAMES = {
    "max_tokens": "n_predict",
    "logprobs": "n_probs",
    "n": "n_cmpl",
    "repetition_penalty": "repeat_penalty",
}
NO_SEED = (-1, 2**32 - 1)  # either stands for a random one
BANNED = -100.0  # the bias of a token that is never to be sampled
MAX_EXTRA = 256  # texts
MAX_INDENT = 100_000  # spaces and tabs
EUCLIDEAN: Literal[2] = 2  # the norm by which embeddings are divided; -1: none
# Samplers by the names in `samplers`, with the fields that turn them off.
SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
    "penalties": {"repeat_last_n": 0},
}


class OptionsBody(Body):
    """The sampling fields that completions and infilling share. Unset ones use the model's own
    defaults."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SAMPLERS_OFF,
        "post_sampling_probs": (None, False),
        "lora": (None, []),
        "image_data": (None, []),
    }

    n_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = Field(
        default=None, validation_alias=AliasChoices("n_predict", "max_tokens")
    )
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_N)] = Field(
        default=1, validation_alias=AliasChoices("n_cmpl", "n")
    )
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = Field(
        default=0, validation_alias=AliasChoices("n_probs", "logprobs")
    )
    temperature: Annotated[float, Field(le=2)] | None = None
    top_k: Int64 | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: CountOrAll | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    samplers: list[str] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n_indent: Annotated[int, Field(ge=0, le=MAX_INDENT)] | None = None
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    logit_bias: dict[str, float] | list[Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    stream: bool = False
    return_tokens: bool = False
    response_fields: list[str] | None = None

    # These do not change what is generated, or set up the server's own caches and samplers.
    cache_prompt: Any = None
    id_slot: Any = None
    n_keep: Any = None
    n_discard: Any = None
    n_cache_reuse: Any = None
    min_keep: Any = None
    penalize_nl: Any = None
    t_max_prompt_ms: Any = None
    timings_per_token: Any = None
    return_progress: Any = None
    sse_ping_interval: Any = None
    dynatemp_exponent: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    dry_base: Any = None
    dry_allowed_length: Any = None
    dry_penalty_last_n: Any = None
    dry_sequence_breakers: Any = None
    xtc_threshold: Any = None
    adaptive_decay: Any = None

    def completion(self, prompt: Any, logit_bias: Mapping[str, float] | None) -> CompletionBody:
        """The equivalent plain completion of `prompt`."""
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "n": self.n_cmpl,
            "logprobs": self.n_probs or None,
            "temperature": None if self.temperature is None else max(0.0, self.temperature),
            "top_k": None if self.top_k is None else min(max(0, self.top_k), 2**31 - 1),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repeat_last_n": self.repeat_last_n,
            "seed": None if self.seed in NO_SEED else self.seed,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "logit_bias": logit_bias,
            "grammar": self.grammar or None,
            "json_schema": self.json_schema,
            "stream": self.stream,
        }
        fields |= self._turned_off()
        return CompletionBody.model_validate(fields, strict=True)

    def _turned_off(self) -> dict[str, Any]:
        """The fields of samplers that the body leaves out of its chain."""
        if self.samplers is None:
            return {}
        left_out = [fields for name, fields in SAMPLERS.items() if name not in self.samplers]
        return {name: value for fields in left_out for name, value in fields.items()}


class GgmlCompletionBody(OptionsBody):
    """POST /completion."""

    prompt: str | list[Any] | dict[str, Any]


class ExtraText(BaseModel):
    """A further text that the model sees before the one to fill in."""

    model_config = ConfigDict(extra="ignore")

    text: str
    filename: str = ""


class InfillBody(OptionsBody):
    """POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraText], Field(max_length=MAX_EXTRA)] | None = None
    prompt: str = ""


class ContentBody(InputBody):
    """POST /embedding."""

    input: str | list[Any] = Field(validation_alias=AliasChoices("content", "input"))
    embd_normalize: Literal[-1, 2] = EUCLIDEAN


class ApplyTemplateBody(TemplateBody):
    """POST /apply-template."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]


def split_prompts(given: Any, *, most: int) -> list[list[str | int]]:
    """The prompts in a `prompt`, each as the texts and token ids of which it consists.

    A list with a number is one prompt; any other list holds one prompt per item. Raises
    InvalidRequestError that names the item.
    """
    if not isinstance(given, list) or any(_is_token(one) for one in given):
        return [_parts(given, "prompt")]
    if not given:
        raise InvalidRequestError("prompt must not be an empty list", param="prompt")
    if len(given) > most:
        raise InvalidRequestError(
            f"{len(given)} prompts in one call; the limit is {most}", param="prompt"
        )
    return [_parts(one, f"prompt[{index}]") for index, one in enumerate(given)]


def _parts(given: Any, where: str) -> list[str | int]:
    """One prompt, which `where` names in errors."""
    if isinstance(given, dict):
        text, media = given.get("prompt_string"), given.get("multimodal_data")
        if media not in (None, []):
            raise InvalidRequestError(
                f"{where}.multimodal_data is not supported; send images as messages to "
                "/v1/chat/completions",
                param=f"{where}.multimodal_data",
            )
        given = text
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given and all(map(_is_text_or_token, given)):
        return given
    raise InvalidRequestError(
        f"{where} must be text, a list of token ids and texts, or an object with prompt_string; "
        f"got {given!r:.80}",
        param=where,
    )


def _is_text_or_token(value: Any) -> bool:
    return isinstance(value, str) or _is_token(value)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def bias_pairs(given: Mapping[str, Any] | Sequence[Any] | None) -> list[tuple[str | int, float]]:
    """`logit_bias` as pairs of a token id or a text, and the bias."""
    items: Sequence[Any] = list(given.items()) if isinstance(given, Mapping) else given or []
    made: list[tuple[str | int, float]] = []
    for index, item in enumerate(items):
        pair: Any = item if isinstance(item, list | tuple) and len(item) == 2 else (None, None)
        token, bias = pair
        is_number = isinstance(bias, int | float) and bias is not True
        if not (is_number and _is_text_or_token(token)):
            raise InvalidRequestError(
                f"logit_bias[{index}] must be a token id or a text, and a number or false; "
                f"got {item!r:.80}",
                param="logit_bias",
            )
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10:
            token = int(token)
        value = BANNED if bias is False else float(bias)
        made.append((token, max(BANNED, min(-BANNED, value))))
    return made
