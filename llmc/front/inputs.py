"""Checks one prompt with its sampling options and turns it into what the engine needs.

First stop of every request. Everything that a client sends is judged here, against the model's
real limits, so that the engine never meets a token id, a length or a bias that it can't serve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams
from llmc.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


class ModelLimits(Protocol):
    """The part of `start.ModelInfo` that decides what a request may ask for."""

    @property
    def name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def generation_defaults(self) -> Mapping[str, float | int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A request that passed the checks. `sampling.max_tokens` is a number by now."""

    prompt: str | None
    prompt_token_ids: list[int]
    sampling: SamplingParams


class InputProcessor:
    """Prompt and options in, `Input` out; InvalidRequestError names what is wrong."""

    def __init__(self, limits: ModelLimits, tokenizer: Tokenizer | None) -> None:
        self.limits = limits
        self.tokenizer = tokenizer

    def default_sampling(self) -> SamplingParams:
        """SamplingParams with the model's own recommendations (its generation_config)."""
        return SamplingParams(**self.generation_defaults())

    def generation_defaults(self) -> dict[str, Any]:
        """The model's recommendations that are sampling options."""
        known = {f.name for f in dataclasses.fields(SamplingParams) if f.init}
        return {k: v for k, v in self.limits.generation_defaults.items() if k in known}

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{param} needs a tokenizer and {self.limits.name} has none; "
                "send prompt_token_ids and no stop strings",
                param=param,
                code="no_tokenizer",
            )
        return self.tokenizer

    def process(self, prompt: Prompt, sampling: SamplingParams) -> Input:
        """Tokenize `prompt` if it is text, and check it and `sampling` against the model."""
        text, token_ids = self._split(prompt)
        if token_ids is None:
            assert text is not None, "a prompt without ids is text"
            token_ids = self.need_tokenizer("prompt").encode(text)
            self.check_length(len(token_ids))
        else:
            self.check_length(len(token_ids))
            self._check_ids("prompt", token_ids)
        if sampling.stop_strings:
            self.need_tokenizer("stop")
        self._check_sampling(sampling)
        return Input(
            prompt=text,
            prompt_token_ids=token_ids,
            sampling=self._with_max_tokens(len(token_ids), sampling),
        )

    def check_length(self, num_tokens: int) -> None:
        """Refuse a prompt that is empty or leaves no room for a single new token."""
        if num_tokens == 0:
            raise InvalidRequestError("the prompt is empty; send at least one token", param="prompt")
        if num_tokens >= self.capacity:
            raise self._too_long(num_tokens, 1)

    @property
    def capacity(self) -> int:
        """Tokens, prompt and output together, that one request may have."""
        return min(self.limits.max_model_len, self._pool_tokens)

    @property
    def _pool_tokens(self) -> int:
        return self.limits.num_blocks * self.limits.block_size

    @staticmethod
    def _split(prompt: Prompt) -> tuple[str | None, list[int] | None]:
        """(text, ids) of any accepted spelling of a prompt; at least one of them is there."""
        if isinstance(prompt, Mapping):
            text = prompt.get("prompt")
            ids = prompt.get("prompt_token_ids")
            if ids is not None and not isinstance(ids, list | tuple):
                raise InvalidRequestError(
                    f"prompt_token_ids must be a list of token ids, got {ids!r:.80}", param="prompt"
                )
            if (isinstance(text, str) or text is None) and (text is not None or ids is not None):
                return text, None if ids is None else list(ids)
        elif isinstance(prompt, str):
            return prompt, None
        elif isinstance(prompt, list | tuple):
            return None, list(prompt)
        raise InvalidRequestError(
            "a prompt must be text, a list of token ids, or a dict with `prompt` or "
            f"`prompt_token_ids`; got {prompt!r:.80}",
            param="prompt",
        )

    def _check_ids(self, param: str, token_ids: Sequence[Any]) -> None:
        """Against the width of the logits, not the tokenizer's length: that is what indexes."""
        width = self.limits.vocab_size
        for index, token in enumerate(token_ids):
            # type(), not isinstance: True is an int, but no token id.
            if type(token) is not int or not 0 <= token < width:
                raise InvalidRequestError(
                    f"{param}[{index}] must be a token id from 0 to {width - 1}, got {token!r:.80}",
                    param=param,
                )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            self._check_ids(name, getattr(sampling, name) or ())
        self._check_ids("logit_bias", list(sampling.logit_bias or ()))

    def _with_max_tokens(self, num_prompt: int, sampling: SamplingParams) -> SamplingParams:
        """Unset: until the context is full. Set: it must fit, so nothing is cut in silence."""
        room = self.capacity - num_prompt
        if sampling.max_tokens is None:
            if sampling.min_tokens > room:
                raise self._too_long(num_prompt, sampling.min_tokens)
            return dataclasses.replace(sampling, max_tokens=room)
        if sampling.max_tokens > room:
            raise self._too_long(num_prompt, sampling.max_tokens)
        return sampling

    def _too_long(self, num_prompt: int, num_output: int) -> InvalidRequestError:
        wanted = f"{num_prompt} prompt tokens + {num_output} output tokens"
        if self._pool_tokens < self.limits.max_model_len:
            message = (
                f"{wanted} exceed the KV cache of {self._pool_tokens} tokens "
                f"({self.limits.num_blocks} blocks of {self.limits.block_size}); shorten the "
                "prompt, lower max_tokens, or give the engine more kv_cache_memory"
            )
        else:
            message = (
                f"{wanted} exceed the context of {self.limits.max_model_len} tokens; "
                "shorten the prompt or lower max_tokens"
            )
        return InvalidRequestError(message, param="prompt", code="context_length_exceeded")
