"""The tiny configs of the matrix: no number in them is out of reach of what is compared.

A window, a chunk or a floor that no text reaches is a branch of the model that nobody has compared.
So every number of a config that is not small has to be known as a width, or as something else that
counts no tokens (bench/configs/coverage.json): one that nobody has sorted in fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite
from typing import Any

import bench_package  # noqa: F401
import pytest
from tiny_configs import decoder_types, rules, tiny_config

from bench.coverage_case import LENGTHS

REACH = max(LENGTHS) // 2  # a text goes past it, and past it once more
DEPTH = re.compile(r"layers?($|_)|_every_|_every$|_interval$|_period$")
KNOWN = {name for kind in ("sizes", "limits", "no_lengths") for name in rules()[kind]}


def numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of a field, under the name that stands nearest to them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(key if not key.isdigit() else name, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from numbers(name, inner)
    elif isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        yield name, value


def fields(config: Any) -> dict[str, Any]:
    """What concerns the text: towers for images and sound are not compared."""
    text = config.get_text_config()
    parts = {*type(text).sub_configs, "id2label", "label2id", "transformers_version"}
    return {name: value for name, value in text.to_dict().items() if name not in parts}


def out_of_reach(config: Any) -> list[str]:
    """Numbers that no compared text or no layer of the tiny model gets past."""
    depth = getattr(config.get_text_config(), "num_hidden_layers", 0)
    found = []
    for field, value in fields(config).items():
        for name, number in numbers(field, value):
            if name in KNOWN or number != int(number):
                continue
            if DEPTH.search(name) and number >= depth:
                found.append(f"{name} = {number} of {depth} layers")
            elif number > REACH:
                found.append(f"{name} = {number}")
    return found


@pytest.mark.parametrize("model_type", decoder_types())
def test_every_number_is_crossed_by_what_is_compared(model_type: str) -> None:
    found = out_of_reach(tiny_config(model_type))
    assert not found, (
        f"{found}: no comparison crosses these. Make them small (`lengths`, `layers` or the class "
        f"in bench/configs/coverage.json), or list them as `no_lengths` if they count no tokens"
    )


def test_a_length_that_nobody_knows_is_found() -> None:
    config = tiny_config("llama")
    assert not out_of_reach(config)
    config.tokens_before_it_forgets = 4096
    config.rope_parameters["grows_at"] = 512
    config.forgetful_layers = 28
    assert sorted(out_of_reach(config)) == [
        "forgetful_layers = 28 of 2 layers",
        "grows_at = 512",
        "tokens_before_it_forgets = 4096",
    ]


def test_what_every_text_stays_below_is_the_context_alone() -> None:
    """`limits` are what llmc serves no text beyond; all else has to be crossed."""
    assert all(value > max(LENGTHS) for value in rules()["limits"].values())
    assert all(value <= REACH for value in rules()["lengths"].values())
