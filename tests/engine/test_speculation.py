"""Draft tokens: how they are found, when they pay, and what the scheduler makes of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import fake_runner
import pytest
from fake_runner import EOS, VOCAB, DigitGrammars, FakeRunner, FakeStep, run, run_alone
from oracle import AlwaysOn, Replay

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest, EngineStats
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import StepPlan
from llmc.engine.spec_decode.ngram import MAX_INDEXED, NgramIndex, NgramSpeculation
from llmc.engine.spec_decode.policy import SpeculationPolicy
from llmc.engine.spec_decode.speculation import Speculation, count_accepted
from llmc.errors import ConfigError
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import SpeculativeConfig
from llmc.structured_outputs import StructuredOutputsParams

# ---- what the user says ----


def test_lengths_follow_from_what_is_given() -> None:
    def lengths(**given: Any) -> tuple[int, int]:
        return SpeculativeConfig(**given).lengths

    assert lengths() == (2, 4)
    assert lengths(prompt_lookup_max=1) == (1, 1)
    assert lengths(prompt_lookup_min=6) == (6, 6)
    assert lengths(prompt_lookup_min=1, prompt_lookup_max=3) == (1, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "eagle"}, "unknown method 'eagle'; the methods are ngram"),
        ({"draft": 3}, "unknown key 'draft'; the keys are method, num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 32"),
        ({"num_speculative_tokens": True}, "from 1 to 32, got True"),
        ({"prompt_lookup_max": 99}, "prompt_lookup_max must be an integer from 1 to 32, got 99"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 2}, "must not exceed"),
    ],
)
def test_what_is_unknown_or_out_of_range_is_refused(
    given: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{", "[]", "3", '"ngram"'])
def test_text_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config"):
        SpeculativeConfig.parse(text)


def test_a_config_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        EngineConfig(speculative_config="ngram")  # type: ignore[arg-type]


# ---- where draft tokens come from ----


def naive_draft(tokens: Sequence[int], shortest: int, longest: int, most: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[place - length : place]) == list(tokens[-length:]):
                text = list(tokens)
                for i in range(most):
                    text.append(text[place + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_lookup_finds_what_a_search_through_the_text_finds(seed: int) -> None:
    rng = random.Random(seed)
    shortest = rng.randint(1, 3)
    longest = shortest + rng.randint(0, 3)
    tokens = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
    lookup, found = NgramIndex(tokens, shortest, longest), 0
    for _ in range(60):
        most = rng.randint(1, 6)
        draft = lookup.propose(most)
        assert draft == naive_draft(tokens, shortest, longest, most)
        assert (lookup.find() is not None) == bool(draft)
        found += bool(draft)
        tokens += [rng.randrange(3) for _ in range(rng.randint(1, 3))]
    assert found > 5


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    tokens = list(range(3 * MAX_INDEXED)) + [5, 6]
    lookup = NgramIndex(tokens, 2, 4)
    assert [bool(lookup.propose(2)) for _ in range(4)] == [False, False, False, True]
    assert lookup.propose(2) == [7, 8]


def test_draft_tokens_are_accepted_up_to_the_first_that_was_not_drawn() -> None:
    assert count_accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert count_accepted([1, 2, 3], [1, 5, 3, 4]) == 1
    assert count_accepted([1, 2], [None, 2, 3]) == 0


# ---- the switch ----


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def share(seconds: float, num_tokens: int, num_steps: int = 20_000) -> tuple[float, int]:
    """Of plain decoding's speed, where steps of 4 requests with draft tokens take so long and
    give so many tokens, and plain ones take 1. -> and the number of steps with draft tokens."""
    clock = Clock()
    policy, total, num_drafted = SpeculationPolicy(clock), 0, 0
    for _ in range(num_steps):
        is_on = policy.is_on(4)
        clock.now += seconds if is_on else 1.0
        total += num_tokens if is_on else 4
        num_drafted += is_on
        step(policy, num_tokens=num_tokens if is_on else 4, is_plain=not is_on)
    return total / 4 / clock.now, num_drafted


def step(policy: SpeculationPolicy, num_rows: int = 4, **facts: Any) -> None:
    given = {"num_running": 4, "is_decode": True, "draft_seconds": 0.0} | facts
    policy.on_step(num_rows, **given)


def test_draft_tokens_that_are_slower_are_left_for_a_while() -> None:
    """They are tried again, and cost at most 2 % of the time."""
    speed, num_drafted = share(2.0, 6)  # twice as long for half as many tokens more
    assert speed > 0.98 and 16 < num_drafted < 400
    speed, num_drafted = share(1.0, 4)  # neither slower nor faster
    assert speed == pytest.approx(1.0) and num_drafted < 20_000 / 4


def test_draft_tokens_that_are_faster_stay_on() -> None:
    speed, num_drafted = share(1.2, 6)
    assert 1.2 < speed <= 1.25 and num_drafted > 0.95 * 20_000


def test_a_step_of_another_size_says_nothing() -> None:
    clock = Clock()
    policy = SpeculationPolicy(clock)
    for _ in range(5):
        clock.now += 1.0
        step(policy, num_tokens=4, is_plain=True)
    assert policy.is_on(4) and policy.is_on(5) and not policy.is_on(1) and not policy.is_on(8)
    for seconds in (1.0, 1.0, 100.0, 1.0):  # not even a slow one, of a single request
        clock.now += seconds
        step(policy, 1, num_running=1, num_tokens=5, is_plain=False)
    assert policy.is_on(4)


def test_time_in_which_nothing_runs_is_not_counted() -> None:
    clock = Clock()
    policy = SpeculationPolicy(clock)
    for _ in range(5):
        clock.now += 1.0
        step(policy, num_tokens=4, is_plain=True)
    policy.pause()
    clock.now += 1000.0
    step(policy, num_tokens=4, is_plain=False)
    assert policy.is_on(4)


def test_drafting_counts_where_the_step_does_not() -> None:
    """Beside prompts the time of a step is not comparable, but that of the draft model is lost."""
    clock = Clock()
    policy = SpeculationPolicy(clock)
    for _ in range(5):
        clock.now += 1.0
        step(policy, num_tokens=4, is_plain=True)
    clock.now += 50.0
    step(policy, num_tokens=4, is_decode=False, is_plain=False, draft_seconds=3.0)
    assert policy.is_on(4)
    clock.now += 50.0
    step(policy, num_tokens=4, is_decode=False, is_plain=False, draft_seconds=3.0)
    assert not policy.is_on(4)


# ---- what the scheduler makes of them ----


class TimedRunner(FakeRunner):
    """By its clock a step takes 1, `cost` for a draft token in each row, and `once` for any."""

    clock: Clock
    cost: float
    once: float

    def submit(self, plan: StepPlan) -> FakeStep:
        num_drafted = sum(len(work.draft_token_ids) for work in plan.work)
        self.clock.now += 1.0 + self.cost * num_drafted / len(plan.work)
        self.clock.now += self.once * (num_drafted > 0)
        return super().submit(plan)


def engine(
    speculation: Speculation | None = None,
    *,
    num_blocks: int = 512,
    budget: int = 64,
    clock: Clock | None = None,
    cost: float = 0.0,
    once: float = 0.0,
) -> tuple[EngineCore, TimedRunner]:
    runner = TimedRunner(num_blocks=num_blocks, block_size=2, max_tokens=budget, max_rows=4)
    runner.clock, runner.cost, runner.once = clock or Clock(), cost, once
    core = EngineCore(
        runner,
        EngineLimits(
            num_blocks=num_blocks,
            block_size=2,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=256,
            vocab_size=VOCAB,
        ),
        EngineFeatures(eos_token_ids=[EOS], speculation=speculation, grammars=DigitGrammars()),
    )
    return core, runner


def message(name: str, prompt: Sequence[int] = (1, 2, 3), **sampling: Any) -> AddRequest:
    params = {"max_tokens": 24, "ignore_eos": True, "seed": 0} | sampling
    return AddRequest(
        request_id=name, prompt_token_ids=list(prompt), sampling=SamplingParams(**params)
    )


def right(*messages: AddRequest) -> Replay:
    """Speculation that is never wrong, with as many draft tokens as allowed."""
    answers = {m.request_id: run_alone(m, 0, 256).tokens for m in messages}
    return Replay(answers, random.Random(0), error_rate=0.0, fewest=6)


def test_accepted_draft_tokens_save_their_steps() -> None:
    one = message("a", max_tokens=22)
    core, runner = engine(right(one))
    core.add(one)
    [outcome] = run(core).values()
    assert outcome == run_alone(one, 0, 256)
    assert core.stats().num_steps == 1 + 3  # the prompt, then 7 tokens a step
    assert core.stats().num_accepted_tokens == runner.num_accepted == 18


@pytest.mark.parametrize("stop_at", range(2, 9))
def test_a_stop_token_among_accepted_draft_tokens_ends_the_answer(stop_at: int) -> None:
    tokens = run_alone(message("a"), 0, 256).tokens
    one = message("a", stop_token_ids=[tokens[stop_at]], min_tokens=2)
    core, _ = engine(right(message("a")))
    core.add(one)
    [outcome] = run(core).values()
    assert outcome == run_alone(one, 0, 256)
    assert outcome.finish_reason == "stop" and len(outcome.tokens) <= stop_at + 1
    assert core.stats().num_generated_tokens == len(outcome.tokens)
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_draft_tokens_stop_where_the_answer_must() -> None:
    one = message("a", max_tokens=5)
    core, runner = engine(right(message("a")))
    core.add(one)
    assert run(core)["a"] == run_alone(one, 0, 256)
    assert runner.num_drafted == 3  # the prompt's step drew one, the next draws four


def test_draft_tokens_leave_budget_and_blocks_to_the_others() -> None:
    """No request is preempted or skips a step for the draft tokens of another."""
    messages = [message(name, seed=0) for name in "abcd"]
    core, runner = engine(right(*messages), budget=12, num_blocks=4 * 14)
    for one in messages:
        core.add(one)
    assert run(core) == {one.request_id: run_alone(one, 0, 256) for one in messages}
    assert core.stats().num_preemptions == 0
    assert runner.num_accepted > 0


def test_only_what_was_accepted_can_be_shared() -> None:
    """Another request finds an answer with rejected draft tokens in the prefix cache."""
    one = message("a")
    answer = run_alone(one, 0, 256).tokens
    core, runner = engine(Replay({"a": answer}, random.Random(1), error_rate=0.4))
    core.add(one)
    run(core)
    assert runner.num_drafted > runner.num_accepted > 0
    core.add(message("b", [1, 2, 3, *answer], max_tokens=4))
    run(core)  # the runner looks at every block that is read
    assert core.stats().prefix_cache_hits >= 24


def test_structured_outputs_have_no_draft_tokens() -> None:
    speculation = NgramSpeculation(SpeculativeConfig(prompt_lookup_min=1), AlwaysOn())
    core, runner = engine(speculation)
    core.add(message("a", ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="12")))
    run(core)
    assert core.stats().num_generated_tokens > 5 and runner.num_drafted == 0


# ---- whether it pays ----


def seconds(with_drafts: bool, cost: float, once: float) -> tuple[float, EngineStats]:
    """The time of 30 answers of 200 tokens, 4 at a time."""
    clock = Clock()
    config = SpeculativeConfig(prompt_lookup_min=1)
    speculation = NgramSpeculation(config, SpeculationPolicy(clock))
    core, _ = engine(speculation if with_drafts else None, clock=clock, cost=cost, once=once)
    for index in range(30):
        core.add(message(str(index), [1 + index % 7, 2, index % 5], max_tokens=200, seed=index))
    while core.has_work:
        core.step()
    return clock.now, core.stats()


@cache
def plain_seconds() -> float:
    """Without draft tokens a step takes 1, whatever they would cost and the text says."""
    return seconds(False, 0.0, 0.0)[0]


@pytest.mark.parametrize(
    ("cost", "once"), [(0.02, 0.0), (0.1, 0.0), (0.3, 0.0), (1.0, 0.0), (0.1, 2.0)]
)
def test_text_that_can_not_be_predicted_loses_little(cost: float, once: float) -> None:
    """Nine tokens without any order: something is always found, and it is mostly wrong."""
    drafting, stats = seconds(True, cost, once)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens / 4
    assert plain_seconds() / drafting >= 0.97


def test_where_nothing_is_found_the_switch_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drafted and nothing lost; what is found at last is used at once."""
    draw = fake_runner.draw

    def repeat_late(last: int, seed: int, num_output: int, *rest: Any) -> int | None:
        return 1 + num_output % 7 if num_output >= 120 else draw(last, seed, num_output, *rest)

    class Ticking(Clock):
        def __call__(self) -> float:
            self.now += 1.0
            return self.now

    monkeypatch.setattr(fake_runner, "draw", repeat_late)
    config = SpeculativeConfig(prompt_lookup_min=8)
    core, _ = engine(NgramSpeculation(config, SpeculationPolicy(Ticking())))
    core.add(message("a", max_tokens=220))
    while core.stats().num_generated_tokens < 120:
        core.step()
    assert core.stats().num_drafts == 0
    run(core)
    # seven tokens to repeat, eight to look up, and then four of five are draft tokens
    assert core.stats().num_accepted_tokens >= 4 * 16


@pytest.mark.parametrize(
    ("cost", "once", "least"), [(0.02, 0.0, 3.5), (0.1, 0.0, 2.5), (0.3, 0.0, 1.5), (0.1, 2.0, 1.0)]
)
def test_text_that_repeats_gains(
    cost: float, once: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat(last: int, seed: int, num_output: int, *_: Any) -> int:
        return 1 + num_output % 7

    monkeypatch.setattr(fake_runner, "draw", repeat)
    drafting, stats = seconds(True, cost, once)
    assert stats.num_accepted_tokens > 0
    assert plain_seconds() / drafting >= least
