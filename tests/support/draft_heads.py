"""Draft heads on real runners: a drafter from the first step on, and checks for each answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tiny_engine
import torch
from oracle import AlwaysOn
from speculation_cases import NUM_TOKENS, PROMPTS

from llmc.engine.core import EngineCore
from llmc.engine.messages import EngineStats
from llmc.engine.options import EngineLimits
from llmc.engine.plan import NewRow, StepPlan
from llmc.engine.spec_decode.draft_model import DraftModel, DraftModelSpeculation
from llmc.runner.model_runner import ModelRunner
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import SpeculativeConfig

CONFIG = SpeculativeConfig(method="eagle3", model="head")


def drafter(running: tiny_engine.Running) -> ModelRunner:
    speculation = running.started.engine.scheduler.speculation
    assert isinstance(speculation, DraftModelSpeculation)
    runner = speculation.model.runner
    assert isinstance(runner, ModelRunner)
    return runner


def eager(running: tiny_engine.Running, runner: ModelRunner | None = None) -> DraftModelSpeculation:
    """A new one on the head's runner, which drafts from the first step on."""
    info = running.started.info
    limits = EngineLimits(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=tiny_engine.MAX_ROWS,
        max_num_batched_tokens=64,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
    )
    runner = runner or drafter(running)
    speculation = running.started.engine.scheduler.speculation
    is_head = not isinstance(speculation, DraftModelSpeculation) or speculation.model.is_head
    model = DraftModel(runner, limits, target_vocab_size=info.vocab_size, is_head=is_head)
    return DraftModelSpeculation(CONFIG, model, AlwaysOn())


def check_empty(engine: EngineCore) -> None:
    """Check that nothing remains in either cache."""
    speculation = engine.scheduler.speculation
    assert isinstance(speculation, DraftModelSpeculation)
    engine.check()
    assert speculation.num_failures == 0
    for pool in (engine.scheduler.pool, speculation.model.pool):
        assert pool.num_free == pool.num_blocks


def row(tokens: list[int]) -> NewRow:
    return NewRow(
        row=0,
        request_id="one",
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        stop_token_ids=(),
    )


def logits_of(running: tiny_engine.Running, plan: StepPlan) -> torch.Tensor:
    """The logits of the head's sampling row. The state for the next step is unchanged."""
    before = [state.clone() for state in running.states]
    logits = drafter(running).logits(plan)
    for state, old in zip(running.states, before, strict=True):
        state.copy_(old)
    return logits[0]


def check_logits(got: torch.Tensor, want: torch.Tensor) -> None:
    known = want.isfinite()
    assert torch.equal(got.isfinite(), known)
    torch.testing.assert_close(got[known], want[known], rtol=1e-4, atol=1e-4)


def answers_are_those_without_it(
    running: tiny_engine.Running,
    limits: dict[str, int],
    sampling: dict[str, Any],
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> EngineStats:
    want = tiny_engine.generate(running.engine(), prompts, NUM_TOKENS, **sampling)
    engine = running.engine(speculation=eager(running), **limits)
    got = tiny_engine.generate(engine, prompts, NUM_TOKENS, **sampling)
    assert [one.tokens for one in got] == [one.tokens for one in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=tiny_engine.LOGPROB_TOLERANCE)
    check_empty(engine)
    stats = engine.stats()
    assert stats.num_generated_tokens == sum(len(one.tokens) for one in want)
    assert stats.num_draft_tokens > 0
    return stats
