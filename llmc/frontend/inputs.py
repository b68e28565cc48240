"""Turns one prompt with its sampling options into the engine's input, and validates it.

Every request is validated here first, and only here: the rules about text are in this file, the
engine's own in engine/admission.py. So callers get errors from their own call, and the same ones
from `LLM`, `AsyncLLM` and the server.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.engine import admission
from llmc.errors import InvalidRequestError
from llmc.frontend.images import PromptImages, images_of, take_images
from llmc.image_input import ImageInput
from llmc.lora_request import LoRARequest
from llmc.model_info import ModelInfo
from llmc.pooling import SECOND_TEXT, PoolingInfo, Task
from llmc.sampling_params import BAD_WORD_TOKENS, SamplingParams
from llmc.startup.adapter_files import as_peft
from llmc.structured_outputs import StructuredOutputsParams
from llmc.text.chat import Message, render_chat, render_text
from llmc.text.reasoning import Reasoning
from llmc.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# The engine's parameters for a vector: the request finishes with the prompt.
_POOLED = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
_POOLED_TOKENS = dataclasses.replace(_POOLED, prompt_logprobs=0)
# The tasks of models that return vectors, with their endpoints and methods.
_ASKED: dict[Task, str] = {
    "embed": "embeddings (/v1/embeddings, LLM.embed)",
    "classify": "classification (/classify, LLM.classify)",
    "token_embed": "embeddings of tokens (/pooling, LLM.encode)",
    "token_classify": "classification of tokens (/pooling, LLM.encode)",
}

_PROMPT_KEYS = (
    *("prompt", "prompt_token_ids", "add_special_tokens", "cache_salt", "multi_modal_data"),
)
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """What ends an answer at a line.

    `indent`: after the first line break, a line that begins with fewer spaces and tabs, also an
    empty one, ends the answer before its first other character. `seconds`: a line break so long
    after the first token ends it.
    """

    indent: int = 0
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A validated request. `sampling.max_tokens` is a number, not None."""

    prompt: str | None
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes
    adapter: LoRARequest | None = None
    images: tuple[ImageInput, ...] = ()
    shown_ids: frozenset[int] = frozenset()  # special tokens always shown in the answer's text
    reasoning: Reasoning | None = None  # how the answer's text marks reasoning, if to be split off
    line_limits: LineLimits | None = None

    def showing(self, token_ids: Iterable[int]) -> Input:
        """A copy that shows these special tokens in the answer's text."""
        return dataclasses.replace(self, shown_ids=self.shown_ids.union(token_ids))

    def splitting(self, reasoning: Reasoning, max_tokens: int | None = None) -> Input:
        """A copy that shows the marks of the reasoning in the answer's text. A grammar applies
        after the reasoning.

        `max_tokens`: of the reasoning."""
        sampling, spec = self.sampling, self.sampling.structured_outputs
        if spec is None and max_tokens is not None:
            spec = StructuredOutputsParams(grammar=reasoning.free_answer())
        if spec is not None:
            spec = dataclasses.replace(spec, preamble=reasoning.preamble(max_tokens))
            sampling = dataclasses.replace(sampling, structured_outputs=spec)
        shown = self.showing(reasoning.marks.values())
        return dataclasses.replace(shown, sampling=sampling, reasoning=reasoning)

    def with_most(self, max_tokens: int) -> Input:
        """A copy with at most this many tokens of output, of those that fit."""
        assert self.sampling.max_tokens is not None, "it is a number in an Input"
        most = min(max_tokens, self.sampling.max_tokens)
        return dataclasses.replace(
            self, sampling=dataclasses.replace(self.sampling, max_tokens=most)
        )

    def limited(self, limits: LineLimits) -> Input:
        return dataclasses.replace(self, line_limits=limits)

    def with_adapter(self, adapter: LoRARequest | None) -> Input:
        """`adapter`: in PEFT's format on this machine."""
        return dataclasses.replace(self, adapter=adapter)

    def salted(self, cache_salt: str | None) -> Input:
        admission.check_cache_salt(cache_salt)
        return dataclasses.replace(self, cache_salt=cache_salt)


class InputProcessor:
    """Turns prompts and options into `Input`s. InvalidRequestError says what is wrong."""

    def __init__(self, model: ModelInfo, tokenizer: Tokenizer | None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._images = PromptImages(model.images, model.image_refusal, model.name, model.path)
        self._defaults = _usable_defaults(model, has_tokenizer=tokenizer is not None)
        self._limits = admission.Limits(
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            num_blocks=model.num_blocks,
            block_size=model.block_size,
            pool_tokens=model.pool_tokens,
            eos_token_ids=frozenset(model.eos_token_ids),
        )

    def default_sampling(self) -> SamplingParams:
        """SamplingParams with the model's own defaults (its generation_config)."""
        return SamplingParams(**self.generation_defaults())

    def generation_defaults(self) -> dict[str, Any]:
        """The model's own defaults, as keyword arguments of SamplingParams."""
        return dict(self._defaults)

    def adapter(self, given: LoRARequest | None) -> LoRARequest | None:
        """A caller's adapter in PEFT's format on this machine. May take seconds the first time."""
        if given is not None and not isinstance(given, LoRARequest):
            raise InvalidRequestError(
                f"lora_request must be a LoRARequest, got {given!r:.80}", param="lora_request"
            )
        return given and as_peft(given, self.model.path)

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{param} needs a tokenizer, but {self.model.name} has none; "
                "send prompt_token_ids and no stop strings",
                param=param,
                code="no_tokenizer",
            )
        return self.tokenizer

    def process(self, prompt: Prompt, sampling: SamplingParams) -> Input:
        """Tokenize `prompt` if it is text, truncate it if `sampling` says so, and validate both for
        the model."""
        self.need_generation()
        text, token_ids = self._split(prompt)
        options = prompt if isinstance(prompt, Mapping) else {}
        salt, special = options.get("cache_salt"), options.get("add_special_tokens")
        admission.check_cache_salt(salt)
        images: tuple[ImageInput, ...] = ()
        media = options.get("multi_modal_data")
        given = [] if media is None else images_of(media, self._images.check)
        if given and token_ids is not None:
            raise InvalidRequestError(
                "a prompt of token ids can't have images; send text with placeholders for them",
                param="multi_modal_data",
            )
        if token_ids is None:
            assert text is not None, "a prompt without ids is text"
            encode = functools.partial(
                self.need_tokenizer("prompt").encode, add_special_tokens=special is not False
            )
            if given:
                prepared = self._images.prepare(text, given, encode)
                token_ids, images = prepared.token_ids, prepared.images
                if sampling.prompt_logprobs is not None:
                    self._images.check_scored()
            else:
                token_ids = encode(text)
        most = admission.most_prompt_tokens(sampling, self._limits)
        is_cut = False
        if most is not None and len(token_ids) > most:
            is_cut = True
            if images:
                raise InvalidRequestError(
                    f"a prompt with images can't be truncated: it has {len(token_ids)} tokens, and "
                    f"truncate_prompt_tokens={sampling.truncate_prompt_tokens} keeps {most}",
                    param="truncate_prompt_tokens",
                )
            token_ids = token_ids[-most:]
        if sampling.stop_strings:
            self.need_tokenizer("stop")
        sampling = self._with_bad_words(sampling)
        admission.check_request(token_ids, sampling, self._limits)
        self._check_extra_args(sampling)
        if is_cut and text is not None:
            tokenizer = self.tokenizer
            text = tokenizer.decode(token_ids, skip_special_tokens=False) if tokenizer else None
        if sampling.max_tokens is None:  # until the context is full
            total = admission.total_tokens(len(token_ids), None, self._limits)
            sampling = dataclasses.replace(sampling, max_tokens=total - len(token_ids))
        return Input(
            prompt=text,
            prompt_token_ids=token_ids,
            sampling=sampling,
            cache_salt=salt,
            images=images,
        )

    def render(self, messages: Sequence[Message], **options: Any) -> Prompt:
        """Render a conversation with the model's chat template: to token ids or, with images, to
        text and the images. `options` are those of `render_chat`."""
        tokenizer = self.need_tokenizer("messages")
        taken, images = take_images(messages, self._images.check)
        if not images:
            return render_chat(tokenizer, taken, **options)
        text = render_text(tokenizer, taken, **options)
        return {
            "prompt": text,
            "add_special_tokens": False,  # the template adds them
            "multi_modal_data": {"image": images},
        }

    def need_generation(self) -> None:
        """Raise InvalidRequestError for a model that returns vectors."""
        pooling = self.model.pooling
        if pooling is not None:
            raise InvalidRequestError(
                f"{self.model.name} is served for {_ASKED[pooling.task]} and does not generate "
                "text; if the checkpoint can, start it with task='generate' (--task generate)",
                param="model",
                code="wrong_task",
            )

    def need_pooling(self, *tasks: Task) -> PoolingInfo:
        """Raise InvalidRequestError unless the model returns vectors and, if `tasks` are given, is
        served for one of them."""
        pooling = self.model.pooling
        if pooling is None:
            raise InvalidRequestError(
                f"{self.model.name} is served for text generation; to get vectors of its hidden "
                "states, start it with task='embed' (--task embed)",
                param="model",
                code="wrong_task",
            )
        if tasks and pooling.task not in tasks:
            raise InvalidRequestError(
                f"{self.model.name} is served for {_ASKED[pooling.task]}, not for "
                f"{' or '.join(map(repr, tasks))}",
                param="model",
                code="wrong_task",
            )
        return pooling

    def decode(self, token_ids: Sequence[int]) -> str:
        """Validate token ids; -> their text, with its special tokens."""
        tokenizer = self.need_tokenizer("tokens")
        if token_ids:
            try:
                admission.check_prompt(token_ids, self._limits.vocab_size)
            except InvalidRequestError as exc:
                exc.param = "tokens"
                raise
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    def pooled(
        self, prompt: Prompt, *, pair: str | None = None, truncate: int | None = None
    ) -> Input:
        """Tokenize and validate a pooling request: a prompt, or a text and its `pair`, joined by
        the tokenizer.

        `truncate`: maximum number of tokens, beyond which the end is cut off; -1: the context.
        """
        pooling = self.need_pooling()
        text, token_ids = self._split(prompt)
        types: Sequence[int] = ()
        options = prompt if isinstance(prompt, Mapping) else {}
        if (media := options.get("multi_modal_data")) is not None:
            images_of(media, self._images.check)  # raises if there are any
        salt = options.get("cache_salt")
        admission.check_cache_salt(salt)
        most = self._limits.max_model_len if truncate == -1 else truncate
        if most is not None and not 1 <= most <= self._limits.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or from 1 to {self._limits.max_model_len}, the "
                f"model's context; got {truncate}",
                param="truncate_prompt_tokens",
            )
        if token_ids is None:
            assert text is not None, "a prompt without ids is text"
            tokenizer = self.need_tokenizer("prompt")
            how: dict[str, Any] = {
                "add_special_tokens": options.get("add_special_tokens") is not False,
                "max_length": most,
            }
            if pair is not None and pooling.token_types:
                token_ids, types = tokenizer.encode_pair(text, pair, **how)
            else:
                token_ids = tokenizer.encode(text, pair, **how)
        elif most is not None:
            token_ids = token_ids[:most]
        admission.check_pooled(token_ids, self._limits)
        if any(types):
            token_ids = [i + SECOND_TEXT * t for i, t in zip(token_ids, types, strict=True)]
        sampling = _POOLED_TOKENS if pooling.of_tokens else _POOLED
        return Input(prompt=text, prompt_token_ids=token_ids, sampling=sampling, cache_salt=salt)

    def _check_extra_args(self, sampling: SamplingParams) -> None:
        known = self.model.extra_args
        for name in sampling.extra_args or ():
            if name not in known:
                which = f"accept {', '.join(known)}" if known else "accept none"
                raise InvalidRequestError(
                    f"extra_args has {name!r}, but the logits processors of this engine {which}",
                    param="extra_args",
                )

    def _with_bad_words(self, sampling: SamplingParams) -> SamplingParams:
        """Convert bad words to token ids: both at the start of a text and after a space."""
        if not sampling.bad_words:
            return sampling
        tokenizer = self.need_tokenizer("bad_words")
        words = dict.fromkeys(map(tuple, sampling.bad_words_token_ids or ()))
        for text in sampling.bad_words:
            for spelling in (text, f" {text.lstrip()}"):
                ids = tokenizer.encode(spelling, add_special_tokens=False)
                if len(ids) > BAD_WORD_TOKENS:
                    raise InvalidRequestError(
                        f"the bad word {text[:80]!r} has {len(ids)} tokens; the limit is "
                        f"{BAD_WORD_TOKENS}",
                        param="bad_words",
                    )
                if ids:
                    words[tuple(ids)] = None
        return dataclasses.replace(sampling, bad_words=None, bad_words_token_ids=list(words))

    @staticmethod
    def _split(prompt: Prompt) -> tuple[str | None, list[int] | None]:
        """(text, ids) from any accepted form of a prompt; at least one of them is not None."""
        if isinstance(prompt, Mapping):
            unknown = [k for k, v in prompt.items() if k not in _PROMPT_KEYS and v is not None]
            if unknown:
                raise InvalidRequestError(
                    f"a prompt has {unknown[0]!r:.80}; it can have {', '.join(_PROMPT_KEYS)}",
                    param="prompt",
                )
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


def _usable_defaults(model: ModelInfo, *, has_tokenizer: bool) -> dict[str, Any]:
    """The valid defaults of a model. Invalid ones are ignored with a warning."""
    known = {f.name for f in dataclasses.fields(SamplingParams) if f.init}
    usable: dict[str, Any] = {}
    for name, value in model.generation_defaults.items():
        if name not in known or (name == "stop" and not has_tokenizer):
            continue
        if name == "bad_words_token_ids":  # tokens beyond the logits can't be generated anyway
            value = [word for word in value if max(word) < model.vocab_size]
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as exc:
            log.warning("ignoring a value of the model's generation_config: %s", exc)
        else:
            usable[name] = value
    return usable
