"""`python -m bench.prompts`: the shapes that it measures."""

from __future__ import annotations

import bench_package  # noqa: F401 - makes `bench` importable

from bench.prompts import shapes
from llmc.kernels.prompts import MIN_TOKENS


def test_every_shape_is_a_prompt_that_flash_takes() -> None:
    found = list(shapes())
    assert len(set(found)) == len(found) > 10
    assert all(tokens >= MIN_TOKENS and dim % 8 == 0 and dim <= 256 for dim, tokens in found)
