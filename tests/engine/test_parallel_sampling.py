"""Sequences of one prompt share its blocks; nothing but memory and work shows that they do."""

from __future__ import annotations

import dataclasses
import logging
import random

import pytest
from fake_runner import FakeRunner, Outcome, run, run_alone

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams

SIZE = 4
OUTPUT = 10
ROOM = 400  # the context


def engine(
    *, num_blocks: int = 200, caching: bool = False, budget: int = 64, share: bool = True
) -> tuple[EngineCore, FakeRunner]:
    runner = FakeRunner(
        num_blocks=num_blocks, block_size=SIZE, max_tokens=budget, max_rows=8, max_in_flight=2
    )
    core = EngineCore(
        runner,
        EngineLimits(
            num_blocks=num_blocks,
            block_size=SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=ROOM,
            vocab_size=9,
        ),
        EngineFeatures(eos_token_ids=[0], enable_prefix_caching=caching, share_prompts=share),
    )
    return core, runner


def siblings(num_prompt: int, n: int = 8) -> list[AddRequest]:
    first = AddRequest(
        request_id="s0",
        prompt_token_ids=[1 + (k * k) % 8 for k in range(num_prompt)],
        sampling=SamplingParams(max_tokens=OUTPUT, seed=0, ignore_eos=True),
    )
    others = [
        dataclasses.replace(
            first,
            request_id=f"s{seed}",
            sampling=dataclasses.replace(first.sampling, seed=seed),
            fork_of="s0",
        )
        for seed in range(1, n)
    ]
    return [first, *others]


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // SIZE)


@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("num_prompt", [200, 201, 203])
def test_eight_hold_the_prompt_once(num_prompt: int, caching: bool) -> None:
    core, runner = engine(caching=caching)
    messages = siblings(num_prompt)
    for message in messages:
        core.add(message)
    outcomes = run(core)
    for seed, message in enumerate(messages):
        assert outcomes[message.request_id] == run_alone(message, seed, ROOM)
    assert len({tuple(outcome.tokens) for outcome in outcomes.values()}) > 1
    assert runner.most_blocks <= blocks_for(num_prompt) + 8 * (blocks_for(OUTPUT) + 1)
    # the last token of the prompt is in a block with others before it, unless it begins one
    assert runner.num_copies == (0 if num_prompt % SIZE == 1 else 7)


def test_without_sharing_each_computes_its_own() -> None:
    outcomes = {}
    for share in (True, False):
        core, runner = engine(share=share, num_blocks=500)
        for message in siblings(num_prompt=102, n=4):
            core.add(message)
        outcomes[share] = run(core)
        alone = blocks_for(102) + blocks_for(OUTPUT)
        assert (runner.most_blocks <= alone + 3 * (blocks_for(OUTPUT) + 1)) == share
        assert (runner.num_copies > 0) == share
    assert outcomes[True] == outcomes[False]


def test_the_prompt_counts_as_cached_for_no_request() -> None:
    core, _ = engine(caching=True)
    for message in siblings(num_prompt=40, n=3):
        core.add(message)
    cached = set()
    while core.has_work:
        cached |= {update.num_cached_tokens for update in core.step()}
    assert cached == {0} and core.stats().prefix_cache_hits == 0


@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("num_steps", range(6))
def test_the_first_may_be_aborted_at_any_time(num_steps: int, caching: bool) -> None:
    core, _ = engine(caching=caching, budget=16)  # the prompt takes three steps
    messages = siblings(num_prompt=39, n=4)
    for message in messages:
        core.add(message)
    outcomes: dict[str, Outcome] = {message.request_id: Outcome() for message in messages}
    for _ in range(num_steps):
        for update in core.step():
            outcomes[update.request_id].take(update)
    core.abort("s0")
    for name, outcome in run(core).items():
        outcomes[name].tokens += outcome.tokens
    for seed, message in enumerate(messages[1:], start=1):
        assert outcomes[message.request_id].tokens == run_alone(message, seed, ROOM).tokens


def test_they_share_again_after_preemption() -> None:
    core, runner = engine(num_blocks=20)
    messages = siblings(num_prompt=39)
    for message in messages:
        core.add(message)
    outcomes = run(core)
    assert core.stats().num_preemptions > 0 and runner.restarts > 0
    assert runner.num_copies > 7 - runner.restarts
    for seed, message in enumerate(messages):
        assert outcomes[message.request_id] == run_alone(message, seed, ROOM)


def test_a_poisoned_source_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "llmc.engine.core")
    core, runner = engine()
    runner.poison = {"s0": 12}
    messages = siblings(num_prompt=39, n=4)
    for message in messages:
        core.add(message)
    outcomes = run(core)
    assert outcomes["s0"].finish_reason == "error"
    for seed, message in enumerate(messages[1:], start=1):
        assert outcomes[message.request_id] == run_alone(message, seed, ROOM)


def test_rows_are_kept_for_those_that_wait_for_their_prompt() -> None:
    core, runner = engine(budget=16)
    messages = siblings(num_prompt=39, n=4)
    for message in messages:
        core.add(message)
    for index in range(8):
        core.add(dataclasses.replace(messages[0], request_id=f"other{index}", fork_of=None))
    run(core)
    order = runner.first_scheduled
    assert order[0] == "s0" and set(order[:8]) == {*("s0", "s1", "s2", "s3"), *order[1:8]}
    assert {"s1", "s2", "s3"} < set(order[:8])


def test_a_fork_of_one_that_has_ended_stands_alone() -> None:
    core, _ = engine()
    first, second = siblings(num_prompt=9, n=2)
    core.add(first)
    run(core)
    core.add(second)
    assert run(core)["s1"] == run_alone(second, 1, ROOM)


def test_a_fork_must_have_the_same_prompt() -> None:
    core, _ = engine()
    first, second = siblings(num_prompt=9, n=2)
    core.add(first)
    with pytest.raises(InvalidRequestError, match="'s0', which has another prompt") as caught:
        core.add(dataclasses.replace(second, prompt_token_ids=[1, 2]))
    assert caught.value.param == "fork_of"
    assert set(run(core)) == {"s0"}


@pytest.mark.parametrize("seed", [100, 154, 246, 385])
def test_forks_that_come_back_together_copy_what_is_there(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After failed steps some of a group start over at once. A plan's copies are made together,
    so none of them may be of a block that another one is to fill. These seeds met that."""
    caplog.set_level(logging.CRITICAL, "llmc.engine.core")
    rng = random.Random(seed)
    core, runner = engine(num_blocks=rng.choice([20, 40, 200]), budget=rng.choice([8, 16, 64]))
    runner.rng, runner.fault_rate = rng, 0.15
    messages = siblings(num_prompt=rng.choice([6, 7, 11, 15]), n=5)
    for message in messages:
        core.add(message)
    outcomes: dict[str, Outcome] = {}
    for num_steps in range(1000):
        runner.fault_rate = 0.15 if num_steps < 40 else 0.0
        for update in core.step():
            outcomes.setdefault(update.request_id, Outcome()).take(update)
        core.check()
    for index, message in enumerate(messages):
        if outcomes[message.request_id].error is None:
            assert outcomes[message.request_id] == run_alone(message, index, ROOM)
