"""Per-request sampling options, with vLLM's names and meanings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmc.errors import InvalidRequestError
from llmc.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 64
MAX_EXTRA_ARGS = 16
MAX_EXTRA_NAME = 64  # characters
MAX_EXTRA_TEXT = 1024  # characters
MAX_EXTRA_LIST = 256
ExtraArg = bool | int | float | str | Sequence[bool | int | float | str]
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 64  # token sequences; one text can need two
BAD_WORD_TOKENS = 16  # as in kernels/step_inputs.py, which imports torch (a test compares them)


def _fail(name: str, value: object, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {rule}, got {value!r}", param=name)


def _number(name: str, value: object, low: float, high: float, rule: str) -> None:
    """Reject non-numbers, bools, NaN and infinities, and values outside [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _fail(name, value, rule)
    if not math.isfinite(value) or not low <= value <= high:
        raise _fail(name, value, rule)


def _integer(name: str, value: object, low: int, high: int, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _fail(name, value, rule)


def _is_scalar(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_EXTRA_TEXT
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and -(2**63) <= value < 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    Token ids (`stop_token_ids`, `logit_bias`, `allowed_token_ids`) are checked against the
    model's vocabulary when the request is admitted, since only the engine knows its size.
    Raises InvalidRequestError (a ValueError) for a value outside its range.
    """

    n: int = 1  # completions per prompt, 1 to 128
    best_of: int | None = None  # generate this many, return the n most likely; None: n
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # (0, 10]
    repeat_last_n: int = -1  # penalties look at so many of the latest tokens; -1: all, 0: none
    logit_bias: Mapping[int, float] | None = None  # token id -> [-100, 100]
    allowed_token_ids: Sequence[int] | None = None  # only these can be sampled
    bad_words: Sequence[str] | None = None  # texts that the output must not contain
    bad_words_token_ids: Sequence[Sequence[int]] | None = None  # the same as token ids
    seed: int | None = None  # None or -1: drawn from the engine's seed
    max_tokens: int | None = 16  # 0: only the prompt is scored; None: until the context is full
    min_tokens: int = 0  # no stop token before this many
    stop: str | Sequence[str] | None = None  # text that ends the output; not included in it
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # top alternatives per output token, 0 to 20; None: none
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    truncate_prompt_tokens: int | None = None  # keep the last so many; -1: as many as fit
    extra_args: Mapping[str, ExtraArg] | None = None  # for users' logits processors
    structured_outputs: StructuredOutputsParams | None = None  # a grammar for the output
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    stop_strings: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N, f"an integer from 1 to {MAX_N}")
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N, f"an integer from n to {MAX_N}")
        _number("temperature", self.temperature, 0.0, 100.0, "a number in [0, 100]")
        _number("top_p", self.top_p, 0.0, 1.0, "a number in (0, 1]")
        if self.top_p == 0:
            raise _fail("top_p", self.top_p, "a number in (0, 1]")
        _integer("top_k", self.top_k, -1, 2**31 - 1, "a positive integer, or 0 or -1 for no limit")
        _number("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number in [-2, 2]")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number in [-2, 2]")
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, "a number in (0, 10]")
        if self.repetition_penalty == 0:
            raise _fail("repetition_penalty", 0, "a number in (0, 10]")
        rule = "a number of tokens, or -1 for all"
        _integer("repeat_last_n", self.repeat_last_n, -1, 2**31 - 1, rule)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1, "a 64-bit integer")
        if self.seed == -1:  # no seed, for clients of other engines
            object.__setattr__(self, "seed", None)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1, "an integer of at least 0")
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1, "an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        if self.truncate_prompt_tokens is not None:
            name, rule = "truncate_prompt_tokens", "a positive integer, or -1 for as many as fit"
            _integer(name, self.truncate_prompt_tokens, -1, 2**31 - 1, rule)
            if self.truncate_prompt_tokens == 0:
                raise _fail(name, 0, rule)
        self._check_stop()
        self._check_token_ids()
        self._check_extra_args()
        self._check_structured_outputs()

    def _check_stop(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for text in stop:
            if not isinstance(text, str) or not text:
                raise _fail("stop", text, "a non-empty string or a list of them")
            if len(text) > 1024:
                raise InvalidRequestError(
                    f"a stop string has {len(text)} characters; the limit is 1024", param="stop"
                )
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(stop)} strings; the limit is {MAX_STOP_STRINGS}", param="stop"
            )
        if stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", param="stop")
        object.__setattr__(self, "stop_strings", stop)

    def _check_extra_args(self) -> None:
        args = self.extra_args
        if args is None:
            return
        if not isinstance(args, Mapping) or len(args) > MAX_EXTRA_ARGS:
            raise _fail("extra_args", args, f"a mapping of at most {MAX_EXTRA_ARGS} names")
        rule = (
            "names with a finite number, a bool, a string of at most "
            f"{MAX_EXTRA_TEXT} characters, or a list of at most {MAX_EXTRA_LIST} of these"
        )
        for name, value in args.items():
            values: Sequence[object] = value if isinstance(value, list | tuple) else (value,)
            if not isinstance(name, str) or not 0 < len(name) <= MAX_EXTRA_NAME:
                raise _fail(
                    "extra_args", name, f"keyed by names of 1 to {MAX_EXTRA_NAME} characters"
                )
            if len(values) > MAX_EXTRA_LIST or not all(map(_is_scalar, values)):
                raise InvalidRequestError(
                    f"extra_args must be {rule}; {name!r} is {value!r:.80}", param="extra_args"
                )

    def _check_structured_outputs(self) -> None:
        spec = self.structured_outputs
        if spec is None:
            return
        if not isinstance(spec, StructuredOutputsParams):
            raise _fail("structured_outputs", spec, "a StructuredOutputsParams")
        if self.allowed_token_ids is not None:
            raise InvalidRequestError(
                "structured_outputs and allowed_token_ids both restrict which tokens can be "
                "sampled; give only one of them",
                param="allowed_token_ids",
            )

    def _check_bad_words(self) -> None:
        for text in self.bad_words or ():
            if not isinstance(text, str) or not text:
                raise _fail("bad_words", text, "a list of non-empty strings")
        words = self.bad_words_token_ids or ()
        if max(len(words), len(self.bad_words or ())) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words has {max(len(words), len(self.bad_words or ()))} entries; "
                f"the limit is {MAX_BAD_WORDS}",
                param="bad_words",
            )
        for word in words:
            if not 0 < len(word) <= BAD_WORD_TOKENS:
                raise InvalidRequestError(
                    f"a bad word has {len(word)} tokens; 1 to {BAD_WORD_TOKENS} are allowed",
                    param="bad_words",
                )
            for token in word:
                _integer("bad_words_token_ids", token, 0, 2**31 - 1, "lists of token ids")

    def _check_token_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            for token in ids or ():
                _integer(name, token, 0, 2**31 - 1, "a list of token ids")
        self._check_bad_words()
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise InvalidRequestError(
                "allowed_token_ids is empty, so nothing could be sampled",
                param="allowed_token_ids",
            )
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise InvalidRequestError(
                    f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}",
                    param="logit_bias",
                )
            for token, bias in self.logit_bias.items():
                _integer("logit_bias", token, 0, 2**31 - 1, "keyed by token ids")
                _number("logit_bias", bias, -100.0, 100.0, "a number in [-100, 100]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Beam search options, with the meanings of `generate(num_beams=...)` in transformers.

    Sequences are ranked by the sum of their log-probabilities divided by
    length ** length_penalty, where the length is that of the output including its end token. The
    log-probabilities are the model's own, so `temperature` must be 0.
    """

    beam_width: int = 4  # number of beams and of returned sequences; 1 to 64
    max_tokens: int = 64
    length_penalty: float = 1.0  # [-10, 10]; above 0 favors longer sequences
    early_stopping: bool | Literal["never"] = False  # True: stop when beam_width have ended
    ignore_eos: bool = False
    temperature: float = 0.0

    def __post_init__(self) -> None:
        rule = f"an integer from 1 to {MAX_BEAM_WIDTH}"
        _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH, rule)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "a positive integer")
        _number("length_penalty", self.length_penalty, -10.0, 10.0, "a number in [-10, 10]")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise _fail("early_stopping", self.early_stopping, 'True, False or "never"')
        _number("temperature", self.temperature, 0.0, 0.0, "0: beam search does not sample")
