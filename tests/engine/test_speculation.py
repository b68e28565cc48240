"""Tokens guessed ahead: how they are found, how many, and what the scheduler makes of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import fake_runner
import pytest
from fake_runner import EOS, VOCAB, FakeRunner, FakeStep, run, run_alone
from oracle import Replay

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest, EngineStats
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import StepPlan
from llmc.engine.request import Request
from llmc.engine.spec_decode.draft_pace import Acceptance, DraftCosts, best_length
from llmc.engine.spec_decode.ngram import MAX_INDEXED, PromptLookup
from llmc.engine.spec_decode.pay_check import PayCheck
from llmc.engine.spec_decode.speculation import Speculation, count_accepted
from llmc.errors import ConfigError
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import SpeculativeConfig
from llmc.structured_outputs import StructuredOutputs

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


# ---- where guesses come from ----


def naive_guess(tokens: Sequence[int], shortest: int, longest: int, most: int) -> list[int]:
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
    lookup, found = PromptLookup(tokens, shortest, longest), 0
    for _ in range(60):
        most = rng.randint(1, 6)
        guess = lookup.guess(most)
        assert guess == naive_guess(tokens, shortest, longest, most)
        assert (lookup.find() is not None) == bool(guess)
        found += bool(guess)
        tokens += [rng.randrange(3) for _ in range(rng.randint(1, 3))]
    assert found > 5


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    tokens = list(range(3 * MAX_INDEXED)) + [5, 6]
    lookup = PromptLookup(tokens, 2, 4)
    assert [bool(lookup.guess(2)) for _ in range(4)] == [False, False, False, True]
    assert lookup.guess(2) == [7, 8]


def test_guesses_stand_up_to_the_first_that_was_not_drawn() -> None:
    assert count_accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert count_accepted([1, 2, 3], [1, 5, 3, 4]) == 1
    assert count_accepted([1, 2], [None, 2, 3]) == 0


# ---- how many ----


def test_more_is_guessed_where_guesses_are_right_and_cheap() -> None:
    assert best_length(1.0, 0.1, 4) == 4
    assert best_length(0.05, 0.1, 4) == 0
    assert best_length(0.7, 0.0, 8) == 8
    assert 0 < best_length(0.7, 0.25, 8) < 8
    assert best_length(1.0, 1.0, 8) == 0


def test_after_misses_fewer_are_guessed_and_then_none_for_a_while() -> None:
    """Whatever comes, an answer that can't be guessed loses under 3 % of its steps' time."""
    for cost in (0.05, 0.2, 0.5):
        acceptance, lengths = Acceptance(0.7), []
        for num_tokens in range(100, 1100):
            length = acceptance.length(cost, 8, num_tokens)
            lengths.append(length)
            if length:
                acceptance.saw(length, 0)
        assert lengths[0] > 0
        assert sum(lengths) * cost < 0.03 * 1000
        assert all(length <= 1 for length in lengths[20:])
        assert any(lengths[300:])  # it still tries now and then
        for num_tokens in range(1100, 2600):
            length = acceptance.length(cost, 8, num_tokens)
            if length:
                acceptance.saw(length, length)
        assert acceptance.length(cost, 8, 2600) > 1  # and comes back


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_cost_of_a_guess_is_measured() -> None:
    clock = Clock()
    costs = DraftCosts(clock)
    assert costs.cost(4) is None  # nothing is guessed before plain steps were seen

    def step(seconds: float, num_drafted: int, is_decode: bool = True) -> None:
        clock.now += seconds
        costs.saw_step(4, num_drafted, is_decode)

    for seconds in (9.0, 1.0, 1.0, 5.0, 1.0):  # the first begins nowhere; one is slow by chance
        step(seconds, 0)
    step(30.0, 0, is_decode=False)
    before = costs.cost(4)
    assert before is not None and before < 0.5
    for _ in range(5):
        step(1.5, 4)  # one guess for each of 4 rows makes the step half as long again
    assert costs.cost(4) == pytest.approx(0.5)
    assert costs.cost(5) == pytest.approx(0.5)
    assert costs.cost(1) is None  # a step of another size says nothing
    costs.rest()
    step(100.0, 4)
    assert costs.cost(4) == pytest.approx(0.5)
    for _ in range(2000):  # nothing was guessed for long: what was measured may be outdated
        step(1.0, 0)
    assert costs.cost(4) == before


def test_guesses_that_were_slower_are_left_for_a_while() -> None:
    """At worst they cost 3 % of the time, and where they pay nothing stands in their way."""

    def share(seconds: float, num_accepted: int) -> tuple[float, int]:
        """Of plain decoding's speed, when guesses are made wherever they are allowed."""
        check, spent, tokens, guessed = PayCheck(), 0.0, 0, 0
        for _ in range(50):
            check.saw_plain(4, 1.0)
        for _ in range(20_000):
            if check.allows_guesses:
                check.saw_guessed(4, seconds, num_accepted)
                spent, tokens, guessed = spent + seconds, tokens + 4 + num_accepted, guessed + 1
            else:
                check.saw_plain(4, 1.0)
                spent, tokens = spent + 1.0, tokens + 4
        return tokens / 4 / spent, guessed

    speed, guessed = share(2.0, 2)  # twice as long for half as many tokens more
    assert speed > 0.98 and guessed < 200
    speed, guessed = share(1.2, 2)
    assert speed == pytest.approx(1.25) and guessed == 20_000


def test_a_pause_ends_sooner_after_guesses_that_paid() -> None:
    check = PayCheck()
    check.saw_plain(1, 1.0)

    def pause_after(seconds: float) -> int:
        """Plain steps until guesses are allowed again, after 16 with guesses."""
        for _ in range(16):
            check.saw_guessed(1, seconds, 0)
        count = 0
        while not check.allows_guesses:
            check.saw_plain(1, 1.0)
            count += 1
        return count

    first, second = pause_after(1.5), pause_after(1.5)
    assert 0 < first < second
    assert pause_after(0.5) == 0
    assert pause_after(1.5) == first
    check.saw_guessed(8, 100.0, 0)  # nothing is known of a plain step of so many rows
    assert check.allows_guesses


# ---- what the scheduler makes of them ----


class TimedRunner(FakeRunner):
    """Its clock says what steps would take: 1, `cost` for a guess in each row, `once` for any."""

    clock: Clock
    cost: float
    once: float

    def submit(self, plan: StepPlan) -> FakeStep:
        num_guessed = sum(len(work.draft_token_ids) for work in plan.work)
        self.clock.now += 1.0 + self.cost * num_guessed / len(plan.work)
        self.clock.now += self.once * (num_guessed > 0)
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
        EngineFeatures(eos_token_ids=[EOS], speculation=speculation),
    )
    return core, runner


def message(name: str, prompt: Sequence[int] = (1, 2, 3), **sampling: Any) -> AddRequest:
    params = {"max_tokens": 24, "ignore_eos": True, "seed": 0} | sampling
    return AddRequest(
        request_id=name, prompt_token_ids=list(prompt), sampling=SamplingParams(**params)
    )


def right(*messages: AddRequest) -> Replay:
    """Speculation that is never wrong, and guesses as much as it may."""
    answers = {m.request_id: run_alone(m, 0, 256).tokens for m in messages}
    return Replay(answers, random.Random(0), error_rate=0.0, fewest=6)


def test_right_guesses_save_their_steps() -> None:
    one = message("a", max_tokens=22)
    core, runner = engine(right(one))
    core.add(one)
    [outcome] = run(core).values()
    assert outcome == run_alone(one, 0, 256)
    assert core.stats().num_steps == 1 + 3  # the prompt, then 7 tokens a step
    assert core.stats().num_accepted_tokens == runner.num_accepted == 18


@pytest.mark.parametrize("stop_at", range(2, 9))
def test_a_stop_token_among_accepted_guesses_ends_the_answer(stop_at: int) -> None:
    tokens = run_alone(message("a"), 0, 256).tokens
    one = message("a", stop_token_ids=[tokens[stop_at]], min_tokens=2)
    core, _ = engine(right(message("a")))
    core.add(one)
    [outcome] = run(core).values()
    assert outcome == run_alone(one, 0, 256)
    assert outcome.finish_reason == "stop" and len(outcome.tokens) <= stop_at + 1
    assert core.stats().num_generated_tokens == len(outcome.tokens)
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_guesses_stop_where_the_answer_must() -> None:
    one = message("a", max_tokens=5)
    core, runner = engine(right(message("a")))
    core.add(one)
    assert run(core)["a"] == run_alone(one, 0, 256)
    assert runner.num_guessed == 3  # the prompt's step drew one, the next draws four


def test_guesses_leave_budget_and_blocks_to_the_others() -> None:
    """Nobody is preempted and nobody skips a step for somebody else's guesses."""
    messages = [message(name, seed=0) for name in "abcd"]
    core, runner = engine(right(*messages), budget=12, num_blocks=4 * 14)
    for one in messages:
        core.add(one)
    assert run(core) == {one.request_id: run_alone(one, 0, 256) for one in messages}
    assert core.stats().num_preemptions == 0
    assert runner.num_accepted > 0


def test_only_what_was_accepted_can_be_shared() -> None:
    """Another request finds the blocks of an answer with wrong guesses in the prefix cache."""
    one = message("a")
    answer = run_alone(one, 0, 256).tokens
    core, runner = engine(Replay({"a": answer}, random.Random(1), error_rate=0.4))
    core.add(one)
    run(core)
    assert runner.num_guessed > runner.num_accepted > 0
    core.add(message("b", [1, 2, 3, *answer], max_tokens=4))
    run(core)  # the runner looks at every block that is read
    assert core.stats().prefix_cache_hits >= 24


def test_structured_answers_are_not_guessed() -> None:
    speculation = Speculation(SpeculativeConfig())
    plain, structured = (
        Request(
            request_id="a",
            token_ids=[1],
            num_prompt_tokens=1,
            sampling=SamplingParams(structured_outputs=spec),
            seed=0,
            max_total_tokens=9,
        )
        for spec in (None, StructuredOutputs(regex="a*"))
    )
    speculation.enter(plain)
    speculation.enter(structured)
    assert plain.drafter is not None and structured.drafter is None


# ---- whether it pays ----


def seconds(with_guesses: bool, cost: float, once: float) -> tuple[float, EngineStats]:
    """The time of 30 answers of 200 tokens, 4 at a time."""
    clock = Clock()
    speculation = Speculation(SpeculativeConfig(prompt_lookup_min=1), clock)
    core, _ = engine(speculation if with_guesses else None, clock=clock, cost=cost, once=once)
    for index in range(30):
        core.add(message(str(index), [1 + index % 7, 2, index % 5], max_tokens=200, seed=index))
    run(core)
    return clock.now, core.stats()


@pytest.mark.parametrize(
    ("cost", "once"), [(0.02, 0.0), (0.1, 0.0), (0.3, 0.0), (1.0, 0.0), (0.1, 2.0)]
)
def test_text_that_can_not_be_guessed_loses_little(cost: float, once: float) -> None:
    """Nine tokens without any order: something is always found, and it is mostly wrong."""
    guessing, stats = seconds(True, cost, once)
    plain, _ = seconds(False, cost, once)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens / 4
    assert plain / guessing >= 0.97


@pytest.mark.parametrize(
    ("cost", "once", "least"), [(0.02, 0.0, 3.5), (0.1, 0.0, 2.5), (0.3, 0.0, 1.5), (0.1, 2.0, 1.0)]
)
def test_text_that_repeats_gains(
    cost: float, once: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat(last: int, seed: int, num_output: int, *_: Any) -> int:
        return 1 + num_output % 7

    monkeypatch.setattr(fake_runner, "draw", repeat)
    guessing, stats = seconds(True, cost, once)
    plain, _ = seconds(False, cost, once)
    assert stats.num_accepted_tokens > 0
    assert plain / guessing >= least
