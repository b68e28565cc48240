"""Rank 0 drafts alone, and all ranks of the target check its tokens: answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draft_heads
import pytest
import tiny_engine
import tiny_heads
from rank_threads import RankThreads, rank_threads
from speculation_cases import LIMITS, NUM_TOKENS, PROMPTS
from tiny_models import save_checkpoint

Pair = tuple[tiny_engine.Running, tiny_engine.Running]  # without and with ranks and drafts


def start_pair(target: Path, drafting: dict[str, Any]) -> Pair:
    plain = tiny_engine.start(target)
    with rank_threads():
        ranked = tiny_engine.start(
            target, tensor_parallel_size=2, speculative_config=drafting, async_scheduling=True
        )
    return plain, ranked


@pytest.fixture(scope="module", params=["draft_model", "eagle3"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "draft_model":
        target = draft = save_checkpoint("llama", folder / "target")
    else:
        target, draft = tiny_heads.agreeing(folder)
    made = start_pair(target, {"method": request.param, "model": str(draft)})
    yield made
    processes = made[1].started.rank_processes
    assert isinstance(processes, RankThreads)
    processes.stop()


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_answers_are_those_of_one_rank_without_drafts(pair: Pair, limits: dict[str, int]) -> None:
    plain, ranked = pair
    want = tiny_engine.generate(plain.engine(), PROMPTS, NUM_TOKENS)
    engine = ranked.engine(speculation=draft_heads.eager(ranked), **limits)
    got = tiny_engine.generate(engine, PROMPTS, NUM_TOKENS)
    assert [one.tokens for one in got] == [one.tokens for one in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=tiny_engine.LOGPROB_TOLERANCE)
    stats = engine.stats()
    assert stats.num_failed_steps == 0 and stats.num_accepted_tokens > 0
