"""`python -m bench.prompts`: the shapes that it measures, and what it makes of their times."""

from __future__ import annotations

import bench_package  # noqa: F401 - makes `bench` importable
import pytest

from bench.prompts import LENGTHS, NEVER, lines, shapes
from llmc.kernels.prompts import MIN_TOKENS, prompt_config


def test_every_shape_is_a_prompt_that_flash_takes() -> None:
    found = list(shapes())
    assert len(set(found)) == len(found) > 10
    assert all(tokens >= MIN_TOKENS and dim % 8 == 0 and dim <= 256 for dim, tokens in found)


@pytest.mark.parametrize(
    ("flash", "least"),
    [
        ((1, 1, 1, 1, 1), None),
        ((3, 3, 1, 1, 1), 1024),
        ((1, 3, 1, 1, 1), 1024),  # what is faster below a length at which it isn't does not count
        ((3, 3, 3, 3, 1), 8192),
        ((1, 1, 1, 1, 3), NEVER),
        ((2, 2, 2, 2, 2), NEVER),  # as fast
    ],
)
def test_flash_is_used_from_the_length_on_where_it_stays_faster(
    flash: tuple[int, ...], least: int | None
) -> None:
    times = {
        (64, tokens): {"flash": float(ms), "triton": 2.0}
        for tokens, ms in zip(LENGTHS, flash, strict=True)
    }
    [(key, line)] = lines(times).items()
    assert key == prompt_config.key((64,), prompt_config.rule(64))
    if least is None:
        assert line is None, "the rule in the code says the same"
    else:
        assert line is not None and line["options"] == {"min_tokens": least}
        assert line["arguments"] == {"dim": 64} and line["chosen"] == {"min_tokens": MIN_TOKENS}


def test_nothing_is_concluded_from_a_part_of_the_lengths() -> None:
    whole = {
        (dim, tokens): {"flash": 3.0, "triton": 2.0} for dim in (64, 128) for tokens in LENGTHS
    }
    failed = {**whole, (64, 256): {"error": "out of memory", "where": ""}}
    assert [key[1] for key in lines(failed)] == [(128,)]
    assert [key[1] for key in lines({shape: whole[shape] for shape in list(whole)[:-1]})] == [(64,)]
