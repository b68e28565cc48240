"""A draft model beside the engine: what it computes and drafts; no answer depends on it."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from fake_draft import speculate
from fake_runner import EOS, VOCAB, FakeRunner, FakeStep, Outcome, run_alone

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import StepPlan
from llmc.errors import ConfigError
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import SpeculativeConfig
from llmc.structured_outputs import StructuredOutputsParams

CONTEXT = 64
ROWS = 4


class Pair:
    """An engine with a draft model, both over fake runners."""

    def __init__(
        self,
        *,
        error_rate: float = 0.0,
        depth: int = 1,
        num_blocks: int = 256,
        draft_blocks: int = 256,
        draft_len: int = CONTEXT,
        budget: int = 64,
        is_on: bool = True,
        **options: Any,
    ) -> None:
        self.speculation, self.draft = speculate(
            random.Random(0),
            num_blocks=draft_blocks,
            block_size=2,
            max_tokens=budget,
            max_rows=ROWS,
            max_model_len=draft_len,
            **options,
        )
        self.draft.error_rate = error_rate
        self.plans: list[StepPlan] = []
        self.draft.on_submit = self.plans.append
        self.runner = FakeRunner(
            num_blocks=num_blocks,
            block_size=2,
            max_tokens=budget,
            max_rows=ROWS,
            max_in_flight=depth,
        )
        self.core = EngineCore(
            self.runner,
            EngineLimits(
                num_blocks=num_blocks,
                block_size=2,
                max_num_seqs=ROWS,
                max_num_batched_tokens=budget,
                max_model_len=CONTEXT,
                vocab_size=VOCAB,
            ),
            EngineFeatures(eos_token_ids=[EOS], speculation=self.speculation if is_on else None),
        )
        self.outcomes: dict[str, Outcome] = {}

    def run(self, *messages: AddRequest, steps: int | None = None) -> dict[str, Outcome]:
        """Serve these, or take so many steps."""
        for message in messages:
            self.core.add(message)
            self.outcomes[message.request_id] = Outcome()
        while self.core.has_work and steps != 0:
            for update in self.core.step():
                self.outcomes[update.request_id].take(update)
            self.core.check()
            steps = None if steps is None else steps - 1
        return self.outcomes

    def check(self, num_failures: int = 0) -> None:
        """Nothing is kept in either cache."""
        assert self.speculation.num_failures == num_failures
        assert not self.core.has_work
        self.core.check()
        stats = self.core.stats()
        assert stats.num_free_blocks == stats.num_blocks
        self.speculation.check(())
        pool = self.speculation.model.pool
        assert pool.num_free == pool.num_blocks


def test_the_caches_of_both_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    monkeypatch.setattr(pair.runner, "release_caches", lambda: 100)
    monkeypatch.setattr(pair.draft, "release_caches", lambda: 10)
    pair.run(message("a"))
    pools = pair.core.scheduler.pool, pair.speculation.model.pool
    assert all(pool.draw(1).num_cached > 0 for pool in pools)
    assert pair.core.release_caches() == 110
    assert all(pool.draw(1).num_cached == 0 for pool in pools)
    assert pair.run(message("b")) == alone(message("a"), message("b"))
    pair.check()


def message(name: str, prompt: Sequence[int] = (1, 2, 3), **sampling: Any) -> AddRequest:
    fields = {"fork_of": sampling.pop("fork_of", None)}
    params = {"max_tokens": 40, "ignore_eos": True, "seed": 0} | sampling
    return AddRequest(
        request_id=name, prompt_token_ids=list(prompt), sampling=SamplingParams(**params), **fields
    )


def alone(*messages: AddRequest) -> dict[str, Outcome]:
    return {m.request_id: run_alone(m, m.sampling.seed or 0, CONTEXT) for m in messages}


FOUR = [message(name, [1, 2, 3, seed], seed=seed) for seed, name in enumerate("abcd")]


def test_the_same_model_is_always_right_and_saves_most_steps() -> None:
    pair = Pair()
    assert pair.run(*FOUR) == alone(*FOUR)
    stats = pair.core.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 4 * 25
    # the prompt and three plain ones, to be measured; then five tokens a step
    assert stats.num_steps <= 1 + 3 + 8
    assert stats.num_accepted_tokens / stats.num_drafts == 4  # num_speculative_tokens
    pair.check()


def test_all_requests_are_drafted_side_by_side() -> None:
    pair = Pair()
    pair.run(*FOUR)
    decodes = [plan for plan in pair.plans if plan.is_decode]
    assert len(decodes) > 10 and all(len(plan.work) == 4 for plan in pair.plans)
    assert all(plan.num_tokens <= 4 * 2 for plan in pair.plans[1:])  # at most two are new each time


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("error_rate", [0.1, 0.5, 1.0])
def test_answers_do_not_depend_on_draft_tokens(error_rate: float, depth: int) -> None:
    pair = Pair(error_rate=error_rate, depth=depth)
    assert pair.run(*FOUR) == alone(*FOUR)
    stats = pair.core.stats()
    assert 0 < stats.num_draft_tokens > stats.num_accepted_tokens
    pair.check()


def test_a_long_prompt_is_read_in_chunks() -> None:
    long = message("long", [1 + i % 7 for i in range(45)], max_tokens=15)
    pair = Pair(budget=16)
    assert pair.run(message("a"), long) == alone(message("a"), long)
    assert max(plan.num_tokens for plan in pair.plans) <= 16
    reading = [plan for plan in pair.plans if not any(work.sample for work in plan.work)]
    assert len(reading) >= 3 and pair.outcomes["long"].finish_reason == "length"
    assert pair.core.stats().num_accepted_tokens > 20
    pair.check()


def test_what_others_have_read_is_not_read_again() -> None:
    """The prompt of three sequences is computed once, and stays in the draft model's own cache."""
    prompt = [1 + i % 7 for i in range(24)]
    siblings = [message("a", prompt, seed=1)]
    siblings += [message(n, prompt, seed=s, fork_of="a") for s, n in ((2, "b"), (3, "c"))]
    pair = Pair()
    assert pair.run(*siblings) == alone(*siblings)
    later = message("later", [*prompt, 8], max_tokens=20)
    assert pair.run(later) == alone(*siblings, later)
    read = sum(plan.num_tokens for plan in pair.plans if not any(w.sample for w in plan.work))
    assert read < 2 * len(prompt)
    assert pair.core.stats().num_accepted_tokens > 60
    pair.check()


def test_requests_that_leave_or_lose_their_place_leak_nothing() -> None:
    pair = Pair(error_rate=0.3, num_blocks=34, draft_blocks=40, depth=2)
    pair.run(*FOUR, steps=6)
    assert pair.core.abort("c") is not None
    del pair.outcomes["c"]
    pair.run()
    want = alone(*FOUR)
    del want["c"]
    assert pair.outcomes == want
    assert pair.core.stats().num_preemptions > 0
    pair.check()


def test_few_blocks_for_the_draft_model_cost_draft_tokens_only() -> None:
    pair = Pair(draft_blocks=20)
    assert pair.run(*FOUR) == alone(*FOUR)
    assert 0 < pair.core.stats().num_accepted_tokens < 4 * 25
    pair.check()


def test_drafts_stop_at_the_context_of_the_draft_model() -> None:
    pair = Pair(draft_len=20)
    assert pair.run(*FOUR) == alone(*FOUR)
    assert 0 < pair.core.stats().num_draft_tokens <= 4 * 16
    pair.check()


def test_a_failing_draft_model_starts_over_and_is_then_switched_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    pair = Pair()
    pair.draft.fault_rate = 0.1
    messages = [message(str(i), [1, 2, i], seed=i) for i in range(8)]
    assert pair.run(*messages) == alone(*messages)
    assert pair.draft.faults == 3
    assert [r.message.partition("; ")[2] for r in caplog.records] == [
        "restarting it",
        "restarting it",
        "switching it off",
    ]
    assert pair.core.stats().num_accepted_tokens > 0
    assert pair.core.stats().num_failed_steps == 0
    pair.check(num_failures=3)


def test_a_submit_that_raises_is_a_failure_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()

    def broken(plan: StepPlan) -> None:
        raise RuntimeError("no memory")

    pair.draft.on_submit = broken
    assert pair.run(*FOUR) == alone(*FOUR)
    assert "no memory" in caplog.text and pair.core.stats().num_draft_tokens == 0
    pair.check(num_failures=3)


def test_structured_answers_are_not_followed() -> None:
    pair = Pair()
    spec = SamplingParams(structured_outputs=StructuredOutputsParams(regex="3"))
    assert spec.structured_outputs is not None
    with pytest.raises(Exception, match="not available"):  # the fake engine has no grammars
        pair.core.add(AddRequest(request_id="a", prompt_token_ids=[1], sampling=spec))
    pair.check()


# ---- its configuration ----


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "ngram", "model": "x"}, "model has no effect with method ngram"),
        (
            {"method": "draft_model", "model": "x", "prompt_lookup_min": 2},
            "prompt_lookup_min has no effect with method draft_model",
        ),
        ({"method": "draft_model", "model": 3}, "model must be a name, got 3"),
        ({"method": "eagle3"}, "method eagle3 needs a model"),
        (
            {"method": "eagle3", "model": "x", "prompt_lookup_max": 2},
            "prompt_lookup_max has no effect with method eagle3",
        ),
        ({"method": "mtp", "model": "x"}, "model has no effect with method mtp"),
        ({"method": "mtp", "quantization": "int8"}, "quantization has no effect with method mtp"),
    ],
)
def test_keys_of_another_method_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.of(given)


def test_a_narrower_draft_model_is_given_no_ids_that_it_lacks() -> None:
    """The last token of the target's is beyond it; after that it can't go on."""
    pair = Pair(is_eager=True, vocab_size=VOCAB - 1)
    choices = [
        message("a", [1, 2, 3], logit_bias={VOCAB - 1: 1.0}, min_tokens=3, seed=seed)
        for seed in range(100)
    ]
    biased = next(m for m in choices if VOCAB - 1 not in alone(m)["a"].tokens[:12])
    foreign = message("b", [1, VOCAB - 1, 3], seed=1)
    pair.run(biased, foreign)
    assert pair.outcomes["b"] == run_alone(foreign, 1, CONTEXT)
    [row] = [new for plan in pair.plans for new in plan.new_rows]
    assert row.request_id == "a"
    assert row.sampling.logit_bias is None and row.sampling.min_tokens == 0
    entered = [t for plan in pair.plans for work in plan.work for t in work.entered_token_ids]
    assert entered and max(entered) < VOCAB - 1
    pair.check()


def test_tokens_that_the_target_lacks_are_never_drafted() -> None:
    pair = Pair(target_vocab_size=5)
    assert pair.run(*FOUR) == alone(*FOUR)
    assert 0 < pair.core.stats().num_draft_tokens < 100
    pair.check()


# ---- whether it pays ----


class Load:
    """Answers by a clock that says what steps take: 1 for a plain one, of any number of rows,
    and `step_cost` for one of the draft model; a token more takes `token_cost` of that."""

    def __init__(self, *, step_cost: float, token_cost: float, prompt: int, answer: int) -> None:
        self.now = 0.0
        self.step_cost, self.token_cost = step_cost, token_cost
        self.prompt, self.answer = prompt, answer
        self.num_requests = 60 * 56 // answer  # as many tokens in every load

    def clock(self) -> float:
        return self.now

    def target_step(self, plan: StepPlan) -> None:
        self.now += 1.0 + self.token_cost * (plan.num_tokens - len(plan.work))

    def draft_step(self, plan: StepPlan) -> None:
        more = self.token_cost * (plan.num_tokens - len(plan.work))
        self.now += self.step_cost * (1.0 + more)

    def seconds(self, error_rate: float | None) -> float:
        """With draft tokens, so many of which are wrong, or without speculation."""
        self.now = 0.0
        pair = Pair(clock=self.clock, is_on=error_rate is not None)
        pair.draft.error_rate = error_rate or 0.0
        pair.draft.on_submit = self.draft_step
        submit = pair.runner.submit

        def timed(plan: StepPlan) -> FakeStep:
            self.target_step(plan)
            return submit(plan)

        pair.runner.submit = timed  # type: ignore[method-assign]
        for index in range(self.num_requests):
            prompt = [1 + (index * 7 + i * i) % 7 for i in range(self.prompt)]
            pair.core.add(message(str(index), prompt, max_tokens=self.answer, seed=index))
        while pair.core.has_work:
            pair.core.step()
        self.stats = pair.core.stats()
        return self.now


@cache
def plain_seconds(**load: Any) -> float:
    """Without speculation, where the draft model's steps cost nothing."""
    return Load(step_cost=0.0, **load).seconds(None)


SHORT, LONG = {"prompt": 4, "answer": 56}, {"prompt": 48, "answer": 6}


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["decode", "prefill"])
@pytest.mark.parametrize("step_cost", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("error_rate", [1.0, 0.7, 0.0])
def test_plain_decoding_is_never_much_faster(
    error_rate: float, step_cost: float, lengths: dict[str, int]
) -> None:
    load = Load(step_cost=step_cost, token_cost=0.1, **lengths)
    assert plain_seconds(token_cost=0.1, **lengths) / load.seconds(error_rate) >= 0.97


@pytest.mark.parametrize(
    ("error_rate", "step_cost", "least"), [(0.0, 0.05, 2.5), (0.0, 0.2, 1.8), (0.2, 0.1, 1.5)]
)
def test_a_good_draft_model_pays(error_rate: float, step_cost: float, least: float) -> None:
    load = Load(step_cost=step_cost, token_cost=0.02, **SHORT)
    assert plain_seconds(token_cost=0.02, **SHORT) / load.seconds(error_rate) >= least
    assert load.stats.num_accepted_tokens > 1000
