"""The ranges of SamplingParams: what is inside is accepted, what is outside is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest

from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams
from llmc.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """`low` and `high` are accepted; each of `outside` is refused."""

    low: object
    high: object
    outside: tuple[object, ...]


RANGES = {
    "n": Range(
        low=1,
        high=128,
        outside=(0, 129, 1.0, True),
    ),
    "best_of": Range(
        low=1,
        high=128,
        outside=(0, 129, 2.0, True),
    ),
    "temperature": Range(
        low=0,
        high=100.0,
        outside=(-0.1, 100.5, float("nan"), "1"),
    ),
    "top_p": Range(
        low=1e-6,
        high=1,
        outside=(0.0, 1.01),
    ),
    "top_k": Range(
        low=-1,
        high=2**31 - 1,
        outside=(-2, 1.5),
    ),
    "min_p": Range(
        low=0.0,
        high=1.0,
        outside=(-0.1, 1.1),
    ),
    "presence_penalty": Range(
        low=-2.0,
        high=2.0,
        outside=(-2.1, 2.1),
    ),
    "frequency_penalty": Range(
        low=-2.0,
        high=2.0,
        outside=(-2.1, 2.1),
    ),
    "repetition_penalty": Range(
        low=1e-6,
        high=10.0,
        outside=(0.0, 10.1),
    ),
    "repeat_last_n": Range(
        low=-1,
        high=2**31 - 1,
        outside=(-2, 2**31, 1.0),
    ),
    "logit_bias": Range(
        low={0: -100.0},
        high={7: 100.0},
        outside=({0: 100.5}, {-1: 1.0}, dict.fromkeys(range(301), 1.0)),
    ),
    "allowed_token_ids": Range(
        low=[0],
        high=[1, 2],
        outside=([], [-1]),
    ),
    "seed": Range(
        low=-(2**63),
        high=2**63 - 1,
        outside=(2**63, 0.5),
    ),
    "max_tokens": Range(
        low=0,
        high=2**31 - 1,
        outside=(-1, 1.5),
    ),
    "min_tokens": Range(
        low=0,
        high=16,
        outside=(-1, 17),
    ),
    "stop": Range(
        low="\n",
        high=["a" * 1024] * 16,
        outside=("", ["x"] * 17, "a" * 1025),
    ),
    "stop_token_ids": Range(
        low=[],
        high=[2**31 - 1],
        outside=([-1],),
    ),
    "logprobs": Range(
        low=0,
        high=20,
        outside=(-1, 21),
    ),
    "prompt_logprobs": Range(
        low=0,
        high=20,
        outside=(-1, 21, True),
    ),
    "truncate_prompt_tokens": Range(
        low=-1,
        high=2**31 - 1,
        outside=(0, -2, 1.5, True, 2**31),
    ),
    "bad_words": Range(
        low=[" "],
        high=["a"] * 64,
        outside=([""], ["a"] * 65, [1]),
    ),
    "bad_words_token_ids": Range(
        low=[[0]],
        high=[[2**31 - 1] * 16] * 64,
        outside=([[-1]], [[True]]),
    ),
    "extra_args": Range(
        low={"a": 1, "b": 0.5, "c": True, "d": "text"},
        high={"x" * 64: ["t" * 1024] * 256},
        outside=(
            {"a": None},
            {"a": {}},
            {"a": [[1]]},
            {"a": float("nan")},
            {"a": [float("inf")]},
            {"a": 2**63},
            {"a": "t" * 1025},
            {"a": [1] * 257},
            {"": 1},
            {"x" * 65: 1},
            {str(i): i for i in range(17)},
            [("a", 1)],
        ),
    ),
    "structured_outputs": Range(
        low=StructuredOutputsParams(choice=["a"]),
        high=StructuredOutputsParams(json_object=True),
        outside=("[a-z]", {"regex": "a"}),
    ),
}


def make(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: value})


@pytest.mark.parametrize("name", sorted(RANGES))
def test_ranges(name: str) -> None:
    inside = RANGES[name]
    assert getattr(make(name, inside.low), name) == inside.low
    assert getattr(make(name, inside.high), name) == inside.high
    for value in inside.outside:
        with pytest.raises(InvalidRequestError) as caught:
            make(name, value)
        assert caught.value.param == name


def test_an_error_repeats_the_value_that_was_given() -> None:
    for kept in (0, -2):
        with pytest.raises(InvalidRequestError, match=f"truncate_prompt_tokens .*, got {kept}$"):
            SamplingParams(truncate_prompt_tokens=kept)


def test_all_other_fields_are_switches() -> None:
    for field in fields(SamplingParams):
        if field.init and field.name not in RANGES:
            default = getattr(SamplingParams(), field.name)
            assert isinstance(default, bool)
            assert getattr(make(field.name, not default), field.name) is not default
