"""Fault isolation: a request that makes steps fail ends alone, wherever it does and whoever runs
beside it."""

from __future__ import annotations

import logging

import pytest
from fake_runner import FakeRunner, run, run_alone

from llmc.engine.core import EngineCore
from llmc.engine.fault_bisection import FaultBisection
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import RowWork
from llmc.engine.request import Request
from llmc.sampling_params import SamplingParams

PROMPT = 6
OUTPUT = 12
BLOCKS = 64


def message(index: int) -> AddRequest:
    return AddRequest(
        request_id=f"r{index}",
        prompt_token_ids=[1 + (index * 7 + k) % 8 for k in range(PROMPT)],
        sampling=SamplingParams(max_tokens=OUTPUT, seed=index, ignore_eos=True),
    )


def engine(depth: int, budget: int = 64) -> tuple[EngineCore, FakeRunner]:
    runner = FakeRunner(
        num_blocks=BLOCKS, block_size=4, max_tokens=budget, max_rows=8, max_in_flight=depth
    )
    core = EngineCore(
        runner,
        EngineLimits(
            num_blocks=BLOCKS,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=32,
            vocab_size=9,
        ),
        EngineFeatures(eos_token_ids=[0]),
    )
    return core, runner


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("position", [0, 3, PROMPT - 1, PROMPT, PROMPT + 5])
@pytest.mark.parametrize("culprit", [0, 5, 7])
@pytest.mark.parametrize("budget", [64, 9], ids=["whole", "chunked"])
def test_one_of_eight_is_poisoned(
    depth: int, position: int, culprit: int, budget: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "llmc.engine.core")
    core, runner = engine(depth, budget)
    runner.poison = {f"r{culprit}": position}
    for index in range(8):
        core.add(message(index))
    outcomes = run(core)
    for index in range(8):
        alone = run_alone(message(index), seed=index, room=32)
        got = outcomes[f"r{index}"]
        if index == culprit:
            assert got.finish_reason == "error"
            assert got.error == "the step failed: InjectedFault: midway"
            assert got.tokens == alone.tokens[: max(0, position + 1 - PROMPT)]
        else:
            assert got == alone
    stats = core.stats()
    assert stats.num_free_blocks == BLOCKS and stats.num_finished == 8
    # the step, the whole group, then a half of it at a time down to the one
    assert 1 <= stats.num_failed_steps <= 5
    assert not [row for row in runner.rows.values() if not row.broken and row.num_computed is None]


def test_several_culprits_are_found_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "llmc.engine.core")
    core, runner = engine(depth=2)
    runner.poison = {"r1": 8, "r2": 8, "r6": 8}
    for index in range(8):
        core.add(message(index))
    outcomes = run(core)
    failed = [name for name, got in outcomes.items() if got.finish_reason == "error"]
    assert sorted(failed) == ["r1", "r2", "r6"]
    assert all(len(outcomes[name].tokens) == 3 for name in failed)


def test_a_newcomer_waits_until_the_search_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "llmc.engine.core")
    core, runner = engine(depth=1)
    runner.poison = {"r0": 7, "late": 1}
    for index in range(3):
        core.add(message(index))
    while not runner.faults:
        core.step()
    core.add(message(9))
    while core.scheduler.bisection.groups:
        assert "r9" not in runner.first_scheduled
        core.step()
    assert run(core)["r9"] == run_alone(message(9), seed=9, room=32)


def test_aborts_during_the_search(caplog: pytest.LogCaptureFixture) -> None:
    """Were the culprit to end by abort, its victims would not be bisected for it."""
    caplog.set_level(logging.CRITICAL, "llmc.engine.core")
    core, runner = engine(depth=2)
    runner.poison = {"r0": 7}
    for index in range(2):
        core.add(message(index))
    while not runner.faults:
        core.step()
    assert core.abort("r0") is not None
    assert run(core)["r1"].finish_reason == "length"


def suspect(name: str) -> Request:
    return Request(
        request_id=name,
        token_ids=[1, 2],
        num_prompt_tokens=2,
        sampling=SamplingParams(),
        seed=0,
        max_total_tokens=9,
    )


def test_groups_are_halved_and_emptied() -> None:
    fault_bisection = FaultBisection()
    work = RowWork(row=0, start=4, num_tokens=2, sample=True)
    a, b, c, d = requests = [suspect(name) for name in "abcd"]

    def group() -> list[Request]:
        return [member.request for member in fault_bisection.group]

    assert fault_bisection.on_failure([(one, work) for one in requests]) is None
    assert group() == requests
    assert fault_bisection.on_failure([(one, work) for one in (a, b, c)]) is None  # d had no room
    assert group() == [a]
    fault_bisection.on_success([(a, RowWork(row=0, start=4, num_tokens=1, sample=True))])
    assert group() == [a]
    fault_bisection.on_success([(a, work)])
    assert group() == [b, c]
    fault_bisection.drop(b)
    assert fault_bisection.on_failure([(c, work)]) is c
    assert group() == [d]
    fault_bisection.on_success([(d, work)])
    assert not fault_bisection.groups


def test_a_suspect_first_gets_to_its_work_and_then_does_it() -> None:
    fault_bisection = FaultBisection()
    one = suspect("a")
    fault_bisection.on_failure(
        [(one, RowWork(row=0, start=4, num_tokens=2, sample=True)), (suspect("b"), _WORK)]
    )
    [member, _] = fault_bisection.group
    steps = []
    for one.num_computed in (0, 3, 4, 6, 9):
        steps.append(member.num_wanted)
    assert steps == [4, 1, 2, 1, 1]


_WORK = RowWork(row=1, start=0, num_tokens=1, sample=False)
