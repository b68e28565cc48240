"""The tokens that are compared, and the measures of the comparison."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from llmc.check.compare import TOLERANCES, allowed, deviation, logits_deviation, within
from llmc.check.step import Geometry
from llmc.check.tokens import make_sequences, make_steps


def test_every_token_is_computed_in_order_and_the_longest_is_preempted_once() -> None:
    sequences = make_sequences(None, vocab_size=96, max_len=256, longest=90)
    assert max(s.prompt_len for s in sequences) == 90
    steps = make_steps(sequences)
    done = [0] * len(sequences)
    restarts = []
    for step in steps:
        for chunk in step:
            if chunk.start == 0 and done[chunk.sequence]:
                restarts.append((chunk.sequence, done[chunk.sequence]))
                done[chunk.sequence] = 0
            assert chunk.start == done[chunk.sequence] and chunk.count > 0
            done[chunk.sequence] += chunk.count
    assert done == [len(s.token_ids) for s in sequences]
    assert restarts == [(3, 93)], "while it decodes"
    assert len(steps[0]) == len(sequences), "packed"
    assert any(len({c.count == 1 for c in step}) == 2 for step in steps), "decodes beside chunks"
    assert all(c.count == 1 for c in steps[-1]), "decodes alone"


def test_sequences_fit_a_small_context_and_vocabulary() -> None:
    sequences = make_sequences(lambda text: [ord(c) for c in text], vocab_size=50, max_len=8)
    assert all(2 <= len(s.token_ids) <= 8 for s in sequences)
    assert all(0 <= t < 50 for s in sequences for t in s.token_ids)
    assert all(1 <= s.prompt_len < len(s.token_ids) for s in sequences)


def test_blocks_are_used_once_and_lie_apart() -> None:
    geometry = Geometry.of(make_sequences(None, vocab_size=9, max_len=64), 4, num_groups=2)
    tables = geometry.block_tables()
    assert tables.shape == (geometry.num_sequences, geometry.blocks_each, 2)
    assert sorted(tables.flatten().tolist()) == list(range(geometry.num_blocks))
    assert (tables[:, 1:] - tables[:, :-1] != 1).all()


def test_errors_are_relative_and_nan_is_the_largest() -> None:
    want = [torch.full((2, 3), 2.0), torch.full((1, 3), 2.0)]
    have = [torch.full((2, 3), 2.02), torch.full((1, 3), 2.02)]
    found = deviation(want, have)
    assert found.relative == pytest.approx(0.01, rel=1e-4)
    assert found.max_abs == pytest.approx(0.02, rel=1e-4)
    broken = deviation(want, [have[0], torch.full((1, 3), float("nan"))])
    assert broken.relative == broken.max_abs == float("inf")


def test_the_best_token_counts_unless_it_is_a_tie() -> None:
    want = [torch.tensor([[5.0, 0.0, 0.0], [1.0, 0.999, -5.0]])]
    swapped = [torch.tensor([[0.0, 5.0, 0.0], [0.999, 1.0, -5.0]])]
    found = logits_deviation(want, swapped, tie=0.01)
    assert (found.top1, found.num_ties, found.num_tokens) == (0.5, 1, 2)
    assert found.kl_max > found.kl > 1
    same = logits_deviation(want, want, tie=0.01)
    assert same.kl_max == 0 and same.relative == 0 and same.top1 == 1
    for stated in TOLERANCES.values():
        assert within(same, stated) and not within(found, stated)


def test_logits_that_both_sides_set_to_minus_infinity_are_equal() -> None:
    """Some models ban the ids behind their vocabulary so."""
    torch.manual_seed(0)
    want = [torch.randn(9, 40), torch.randn(4, 40)]
    have = [x + 1e-6 * torch.randn(x.shape) for x in want]
    plain = logits_deviation(want, have, tie=0.01)
    ban = torch.full((1,), -float("inf"))
    banned = logits_deviation(
        [torch.cat([x, ban.expand(len(x), 3)], 1) for x in want],
        [torch.cat([x, ban.expand(len(x), 3)], 1) for x in have],
        tie=0.01,
    )
    assert asdict(banned) == pytest.approx(asdict(plain), rel=1e-6, abs=1e-15)
    for value in ("-inf", "inf", "nan"):  # in one of them only
        wrong = [x.clone() for x in have]
        wrong[1][2, 3] = float(value)
        assert not within(logits_deviation(want, wrong, tie=0.01), TOLERANCES["bfloat16"])
        assert not within(logits_deviation(wrong, want, tie=0.01), TOLERANCES["bfloat16"])


def test_a_median_is_that_of_the_tokens() -> None:
    torch.manual_seed(0)
    want = [torch.randn(9, 40), torch.randn(4, 40)]
    have = [x + 0.01 * torch.randn(x.shape) for x in want]
    other = [x.clone() for x in have]
    other[0][3] = torch.randn(40)  # one chose otherwise
    plain, found = (deviation(want, x, "median").relative for x in (have, other))
    assert plain == pytest.approx(0.01, rel=0.2) and found == pytest.approx(plain, rel=0.2)
    assert deviation(want, other).relative > 0.3
    logits = logits_deviation(want, other, 0.01, "median")
    assert logits.relative == found and logits.kl < 1e-3 < logits.kl_max
    worse = [x + 0.02 * torch.randn(x.shape) for x in want]
    assert deviation(want, worse, "median").relative > 1.6 * plain
    other[0][3, 0] = float("nan")
    assert deviation(want, other, "median").relative == float("inf")


def test_rounding_may_be_twice_the_models_own() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(40, 50, generator=generator)]
    rounded = [exact[0] + 0.01 * torch.randn(40, 50, generator=generator)]
    noise = logits_deviation(exact, rounded, tie=0.1)
    limit = allowed(TOLERANCES["bfloat16"], noise)
    assert limit.relative == 2 * noise.relative < TOLERANCES["bfloat16"].relative
    assert within(noise, limit)
    worse = [exact[0] + 0.03 * torch.randn(40, 50, generator=generator)]
    assert not within(logits_deviation(exact, worse, tie=0.1), limit)
    assert allowed(TOLERANCES["bfloat16"], None) == TOLERANCES["bfloat16"]
