"""The requests of a soak test: valid ones of every kind, drawn from a seed, and invalid inputs.

Each kind of sampling is a line of `TRAITS`; those with fields unknown to this build are left out.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.sampling_params import SamplingParams
from llmc.server.protocol import CompletionBody

CONTEXT = 256  # tokens of prompt and answer
SALTS = (None, None, "red", "blue")
WORDS = ("The scheduler", "e", " a", "\n", "block")
KNOWN = {field.name for field in dataclasses.fields(SamplingParams)}
SERVED = set(CompletionBody.model_fields)

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request. `fields` have the names of SamplingParams and the HTTP body."""

    prompt: tuple[int, ...]
    fields: Mapping[str, Any]
    salt: str | None
    priority: int

    def params(self) -> SamplingParams:
        fields = {name: value for name, value in self.fields.items() if name in KNOWN}
        grammar = fields.get("structured_outputs")
        if grammar is not None:
            from llmc.structured_outputs import StructuredOutputsParams

            fields["structured_outputs"] = StructuredOutputsParams(**grammar)
        return SamplingParams(**fields)

    def body(self) -> Fields:
        asked = {**self.fields, "cache_salt": self.salt, "priority": self.priority}
        fields = {name: value for name, value in asked.items() if name in SERVED}
        return {**fields, "prompt": list(self.prompt), "return_token_ids": True}


def _greedy(rng: random.Random) -> Fields:
    return {"temperature": 0}


def _seeded(rng: random.Random) -> Fields:
    return {
        "temperature": rng.choice([0.5, 1.0, 1.5]),
        "seed": rng.randrange(2**62),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 20]),
        "min_p": rng.choice([0.0, 0.02]),
    }


def _penalized(rng: random.Random) -> Fields:
    return {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2}


def _biased(rng: random.Random) -> Fields:
    return {"logit_bias": {rng.randrange(300): rng.uniform(-9, 9) for _ in range(3)}}


def _stopped(rng: random.Random) -> Fields:
    return {"stop": rng.sample(WORDS, 2), "include_stop_str_in_output": rng.random() < 0.5}


def _stop_token(rng: random.Random) -> Fields:
    return {"stop_token_ids": [rng.randrange(300) for _ in range(20)], "min_tokens": 2}


def _told(rng: random.Random) -> Fields:
    return {"logprobs": rng.randrange(4)}


def _banned(rng: random.Random) -> Fields:
    return {"bad_words": rng.sample(WORDS, 2)}


def _scored(rng: random.Random) -> Fields:
    return {"prompt_logprobs": rng.randrange(3)}


GRAMMARS: tuple[Fields, ...] = (
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json_object": True},
    {"regex": "[ab]{2,8}-[0-9]{1,4}"},
    {"choice": ["yes", "no", "perhaps not"]},
)


def _structured(rng: random.Random) -> Fields:
    return {"structured_outputs": rng.choice(GRAMMARS), "ignore_eos": False}


# What a request can have besides its sampling method, and how often.
TRAITS: tuple[tuple[float, Callable[[random.Random], Fields]], ...] = (
    (0.2, _penalized),
    (0.2, _biased),
    (0.2, _stopped),
    (0.15, _stop_token),
    (0.2, _told),
    (0.15, _banned),
    (0.1, _scored),
    (0.25, _structured),
)


def draw_case(rng: random.Random) -> Case:
    """Draw a request. A third are long; half share a prefix with others, to share blocks."""
    is_long = rng.random() < 1 / 3
    fields: Fields = {
        "max_tokens": rng.randint(30, 80) if is_long else rng.randint(1, 12),
        "n": rng.choice([1, 1, 1, 1, 2, 3]),
        "ignore_eos": rng.random() < 0.7,
        **(_greedy(rng) if rng.random() < 0.4 else _seeded(rng)),
    }
    for share, trait in TRAITS:
        if rng.random() < share:
            wanted = trait(rng)
            if wanted.keys() <= KNOWN:
                fields |= wanted
    if "structured_outputs" in fields:  # tokens that a grammar needs must not be banned
        for name in ("stop_token_ids", "min_tokens", "bad_words", "logit_bias"):
            fields.pop(name, None)
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    return Case(
        prompt=_prompt(rng, is_long),
        fields=fields,
        salt=rng.choice(SALTS),
        priority=rng.choice([-1, 0, 0, 1]),
    )


def _prompt(rng: random.Random, is_long: bool) -> tuple[int, ...]:
    own = [rng.randrange(3, 300) for _ in range(rng.randint(30, 100) if is_long else 7)]
    if rng.random() < 0.5:
        family = random.Random(rng.randrange(4))
        own = [family.randrange(3, 300) for _ in range(rng.choice([32, 53]))] + own
    return tuple(own[: CONTEXT - 90])


# Invalid values by field, to be rejected with 400 over HTTP and InvalidRequestError in Python.
BAD_FIELDS: tuple[Fields, ...] = (
    {"temperature": -1},
    {"top_p": -0.1},
    {"n": 0},
    {"n": 10**9},
    {"max_tokens": -2},
    {"max_tokens": CONTEXT * 2},
    {"min_tokens": 9, "max_tokens": 3},
    {"logprobs": 21},
    {"stop": [""]},
    {"stop_token_ids": [10**6]},
    {"allowed_token_ids": []},
    {"prompt": []},
    {"prompt": [10**6]},
    {"prompt": [-1]},
    {"prompt": [5] * (CONTEXT + 1)},
    {"cache_salt": ""},
)
