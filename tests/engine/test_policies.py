"""Which request is served first, and that none waits for ever."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fake_runner import FakeRunner

from llmc.config import SchedulingPolicy
from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.sampling_params import SamplingParams


def engine(
    policy: SchedulingPolicy = "fcfs", *, rows: int = 2, num_blocks: int = 64, budget: int = 16
) -> tuple[EngineCore, FakeRunner]:
    runner = FakeRunner(num_blocks=num_blocks, block_size=2, max_tokens=budget, max_rows=rows)
    core = EngineCore(
        runner,
        EngineLimits(
            num_blocks=num_blocks,
            block_size=2,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=64,
            vocab_size=9,
        ),
        EngineFeatures(eos_token_ids=[0], scheduling_policy=policy),
    )
    return core, runner


def add(
    core: EngineCore,
    name: str,
    *,
    prompt: Sequence[int] = (1, 2),
    output: int = 4,
    priority: int = 0,
    cache_salt: str | None = None,
) -> None:
    core.add(
        AddRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=output, ignore_eos=True, seed=0),
            priority=priority,
            cache_salt=cache_salt,
        )
    )


def finish(core: EngineCore) -> list[str]:
    """The order in which they end."""
    ended = []
    while core.has_work:
        ended += [u.request_id for u in core.step() if u.finish_reason is not None]
        core.check()
    return ended


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", list("abcde")), ("priority", list("badce"))]
)
def test_order_of_service(policy: SchedulingPolicy, order: list[str]) -> None:
    core, runner = engine(policy, rows=1)
    for name, priority in (("a", 1), ("b", -5), ("c", 2), ("d", 1), ("e", 2)):
        add(core, name, priority=priority)
    assert finish(core) == order == runner.first_scheduled


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "b"), ("priority", "a")])
def test_the_last_rank_is_preempted(policy: SchedulingPolicy, victim: str) -> None:
    core, _ = engine(policy, num_blocks=6)
    add(core, "a", prompt=[1, 2], output=8, priority=1)
    core.step()
    add(core, "b", prompt=[3, 4], output=8, priority=0)
    while not core.stats().num_preemptions:
        core.step()
    assert [r.request_id for r in core.scheduler.waiting] == [victim]
    assert finish(core)[-1] == victim


@pytest.mark.parametrize(("rows", "num_blocks"), [(2, 64), (4, 24)], ids=["rows", "blocks"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_better_priority_takes_the_place_of_a_running_request(
    policy: SchedulingPolicy, rows: int, num_blocks: int
) -> None:
    core, runner = engine(policy, rows=rows, num_blocks=num_blocks, budget=64)
    for name, priority in (("a", 1), ("b", 2)):
        add(core, name, prompt=[int(priority)] * 10, output=12, priority=priority)
    for _ in range(4):
        core.step()
    add(core, "equal", prompt=[3] * 20, output=4, priority=2)  # of the same as b: it waits
    add(core, "urgent", prompt=[4] * 20, output=4, priority=0)
    order = finish(core)
    if policy == "fcfs":
        assert order == ["a", "b", "equal", "urgent"] and runner.restarts == 0
    else:  # b alone gave way; a ran on
        assert order[0] == "urgent" and set(order[1:3]) == {"a", "b"} and order[3] == "equal"
        assert core.stats().num_preemptions == runner.restarts == 1


def test_a_request_that_needs_the_whole_pool_gets_it_however_many_short_ones_come() -> None:
    """Under first come, first served no later request is admitted before it."""
    rng = random.Random(3)
    core, runner = engine(rows=4, num_blocks=16)
    names = iter(f"short{i}" for i in range(10**6))
    for _ in range(6):
        add(core, next(names), output=rng.randint(1, 12))
    core.step()
    add(core, "big", prompt=[3] * 28, output=4)
    before = set(core.scheduler.requests)
    num_steps = 0
    while "big" in core.scheduler.requests:
        add(core, next(names), output=rng.randint(1, 12))  # more than it can ever serve
        core.step()
        num_steps += 1
    assert set(runner.first_scheduled[: len(before)]) == before
    # at worst those before it one after the other, then its own prompt and answer
    assert num_steps <= 6 * 12 + 2 + 4


def test_every_request_of_a_long_queue_waits_only_for_those_before_it() -> None:
    rng = random.Random(4)
    core, runner = engine(rows=3, num_blocks=20)
    lengths = {f"r{i}": (rng.randint(1, 20), rng.randint(1, 20)) for i in range(120)}
    for name, (num_prompt, output) in lengths.items():
        add(core, name, prompt=[rng.randrange(9) for _ in range(num_prompt)], output=output)
    assert sorted(finish(core)) == sorted(lengths)
    assert runner.first_scheduled == list(lengths)
    assert core.stats().num_preemptions > 0


def test_salts_keep_prefixes_apart() -> None:
    cached = {}
    core, _ = engine()
    for name, salt in (("a", None), ("b", "x"), ("c", "x"), ("d", None), ("e", "y")):
        add(core, name, prompt=[5] * 9, cache_salt=salt)
        while core.has_work:
            for update in core.step():
                cached[name] = update.num_cached_tokens
    assert cached == {"a": 0, "b": 0, "c": 8, "d": 8, "e": 0}
