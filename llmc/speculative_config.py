"""SpeculativeConfig: options of speculative decoding, with the keys of `vllm serve`.

Answers are the same with and without it; only the number of steps differs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from llmc.errors import ConfigError

METHODS = ("ngram", "draft_model", "eagle3", "mtp")
_WITH_MODEL = ("draft_model", "eagle3")
MAX_DRAFT = 32
MAX_NGRAM = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How draft tokens are proposed.

    `ngram`: the tokens that followed an earlier occurrence of the last tokens in the same request.
    The last `prompt_lookup_max` tokens are looked up first, then fewer, down to
    `prompt_lookup_min`. The defaults are 4 and 2, or follow from the one that is given.

    `draft_model`: tokens drafted by `model`, a smaller one with the same vocabulary. `revision`
    and `quantization` apply to the draft model; all other options are those of the served model.

    `eagle3`: tokens drafted by `model`, an EAGLE-3 head trained for the served model, from its
    hidden states. The same keys.

    `mtp`: tokens drafted by the checkpoint's multi-token prediction layer, which is stored after
    the model's layers.
    """

    method: Literal["ngram", "draft_model", "eagle3", "mtp"] = "ngram"
    num_speculative_tokens: int = 4  # per request and step
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    model: str | None = None  # a directory or a hub id
    revision: str | None = None
    quantization: Literal["int8", "int4", "fp8", "none"] | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative_config: unknown method {self.method!r}; "
                f"the methods are {', '.join(METHODS)}"
            )
        _check("num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFT)
        self._check_keys()
        if self.method == "ngram":
            self._set_lookup_lengths()

    def _set_lookup_lengths(self) -> None:
        """Fill in what is not given. Other methods keep None, which `_check_keys` accepts again
        when another process builds the same configuration from these fields."""
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), MAX_NGRAM)
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None:
            shortest = min(2, longest or 2)
        if longest is None:
            longest = max(4, shortest)
        if shortest > longest:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min is {shortest} and prompt_lookup_max "
                f"{longest}; the first must not exceed the second"
            )
        object.__setattr__(self, "prompt_lookup_min", shortest)
        object.__setattr__(self, "prompt_lookup_max", longest)

    def _check_keys(self) -> None:
        """Reject keys of other methods, since they would have no effect."""
        if self.method in _WITH_MODEL and not self.model:
            raise ConfigError(
                f"speculative_config: method {self.method} needs a model: a directory or a hub id"
            )
        lookup_keys = ("prompt_lookup_max", "prompt_lookup_min")
        model_keys = ("model", "revision", "quantization")
        unused = () if self.method in _WITH_MODEL else model_keys
        for name in (*unused, *(() if self.method == "ngram" else lookup_keys)):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"speculative_config: {name} has no effect with method {self.method}"
                )
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"speculative_config: model must be a name, got {self.model!r}")

    @property
    def lengths(self) -> tuple[int, int]:
        """Shortest and longest n-gram to look up."""
        assert self.prompt_lookup_min is not None and self.prompt_lookup_max is not None
        return self.prompt_lookup_min, self.prompt_lookup_max

    @classmethod
    def of(cls, given: Mapping[str, object]) -> SpeculativeConfig:
        """Build from a mapping of its fields; the error for an unknown key lists the known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in given if key not in known]
        if unknown:
            raise ConfigError(
                f"speculative_config: unknown key {unknown[0]!r}; the keys are {', '.join(known)}"
            )
        return cls(**given)  # type: ignore[arg-type]  # checked there

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Parse JSON, as on the command line."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"speculative_config is not JSON ({error}): {text!r:.80}") from None
        if not isinstance(given, dict):
            raise ConfigError(f"speculative_config must be a JSON object, got {text!r:.80}")
        return cls.of(given)


def _check(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(
            f"speculative_config: {name} must be an integer from 1 to {most}, got {value!r}"
        )
