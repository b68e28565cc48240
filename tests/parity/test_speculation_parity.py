"""Draft tokens change how many steps an answer takes, never its text: on a real sampler too."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import tiny_models
from oracle import AlwaysOn, Replay
from speculation_cases import LIMITS, NUM_TOKENS, PROMPTS, SAMPLING
from tiny_configs import save_random, tiny_config

from llmc.engine.spec_decode.ngram import NgramSpeculation
from llmc.speculative_config import SpeculativeConfig

NGRAM = {"method": "ngram"}


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tiny_engine.Running:
    path = tiny_models.save_checkpoint(request.param, tmp_path_factory.mktemp("speculation"))
    return tiny_engine.start(path, async_scheduling=True, speculative_config=NGRAM)


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_answers_are_those_without_speculation(
    running: tiny_engine.Running, limits: dict[str, int], sampling: dict[str, Any]
) -> None:
    plain = running.engine()
    want = tiny_engine.generate(plain, PROMPTS, NUM_TOKENS, **sampling)
    answers = {str(index): one.tokens for index, one in enumerate(want)}
    engine = running.engine(speculation=Replay(answers, random.Random(NUM_TOKENS)), **limits)
    got = tiny_engine.generate(engine, PROMPTS, NUM_TOKENS, **sampling)
    assert [one.tokens for one in got] == [one.tokens for one in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=tiny_engine.LOGPROB_TOLERANCE)
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_generated_tokens == sum(len(one.tokens) for one in want)


def test_text_that_repeats_takes_fewer_steps(running: tiny_engine.Running) -> None:
    speculation = NgramSpeculation(SpeculativeConfig(), AlwaysOn())
    engine = running.engine(speculation=speculation)
    got = tiny_engine.generate(engine, PROMPTS[1:3], 30, allowed_token_ids=[7])
    assert [one.tokens for one in got] == [[7] * 30] * 2
    stats = engine.stats()
    assert stats.num_accepted_tokens > 20
    # waiting for a token may cost a step
    assert stats.num_steps < 18


@pytest.mark.parametrize("running", ["llama"], indirect=True)
def test_recurrent_layers_switch_it_off(
    running: tiny_engine.Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert running.started.engine.scheduler.speculation is not None
    caplog.set_level(logging.INFO, "llmc.startup.stages")
    path = save_random(tiny_config("lfm2"), tmp_path)
    started = tiny_engine.start(path, speculative_config=NGRAM).started
    assert started.engine.scheduler.speculation is None
    assert "speculative decoding is off" in caplog.text
