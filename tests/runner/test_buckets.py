"""Buckets: which batch sizes decode steps are padded to, and when one is added."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runner.buckets import Buckets, default_buckets, mixed_tokens


def test_default_buckets_grow_and_end_at_the_most_rows() -> None:
    for most in (1, 2, 3, 7, 64, 100, 256, 1000):
        sizes = default_buckets(most)
        assert sizes[-1] == most
        assert list(sizes) == sorted(set(sizes))
        assert all(b - a <= 64 for a, b in zip(sizes, sizes[1:], strict=False))


@given(st.integers(1, 300))
def test_the_least_size_that_fits_is_chosen(rows: int) -> None:
    sizes = default_buckets(256)
    size = Buckets(sizes).choose(rows)
    assert size == min((s for s in sizes if s >= rows), default=rows)


def test_a_load_between_two_sizes_gets_its_own() -> None:
    buckets = Buckets((1, 8, 64))
    added = [size for _ in range(2000) if (size := buckets.observe(20)) is not None]
    assert added == [20]
    assert buckets.choose(20) == 20 and buckets.choose(21) == 64


def test_little_waste_adds_nothing() -> None:
    buckets = Buckets((1, 8, 64))
    assert all(buckets.observe(60) is None for _ in range(2000))
    assert buckets.sizes == [1, 8, 64]
    assert buckets.num_padding == 2000 * 4 and buckets.num_rows == 2000 * 60


def test_sizes_do_not_grow_without_end() -> None:
    buckets = Buckets((1000,))
    for rows in range(1, 400):
        for _ in range(512):
            buckets.observe(rows)
    assert len(buckets.sizes) <= 9


def test_steps_with_prompts_are_padded_to_a_few_sizes_up_to_2048_tokens() -> None:
    sizes = {tokens: mixed_tokens(tokens) for tokens in range(1, 2049)}
    padded = {tokens: size for tokens, size in sizes.items() if size is not None}
    assert padded.keys() == sizes.keys() and len(set(padded.values())) < 50
    assert all(tokens <= size < 1.25 * tokens + 8 for tokens, size in padded.items())
    assert all(size < tokens + 128 for tokens, size in padded.items())
    assert all(size < 1.125 * tokens for tokens, size in padded.items() if tokens > 512)
    assert padded[2048] == 2048 and mixed_tokens(2049) is None


@pytest.mark.parametrize("sizes", [(), (0, 4), (-1,)])
def test_sizes_must_be_positive(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="batch sizes must be positive"):
        Buckets(sizes)
