"""EngineCore: faults stay with their step, the queue is bounded, and the books add up."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest, RequestUpdate
from llmc.engine.plan import StepPlan, StepResult
from llmc.errors import EngineDeadError, InvalidRequestError, QueueFullError
from llmc.sampling_params import SamplingParams


class ScriptedRunner:
    """Draws token 9, or raises what is next in `errors`."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.errors: list[Exception | None] = []
        self.result: StepResult | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return self.result or StepResult(token_ids=[9] * sum(work.sample for work in plan.work))


def engine(runner: ScriptedRunner, max_num_queued: int | None = None, seed: int = 0) -> EngineCore:
    return EngineCore(
        runner,
        num_blocks=32,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=32,
        vocab_size=10,
        eos_token_ids=[0, 12345],
        seed=seed,
        max_num_queued=max_num_queued,
    )


def add(core: EngineCore, request_id: str, max_tokens: int = 3, seed: int | None = None) -> None:
    core.add(
        AddRequest(
            request_id=request_id,
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(max_tokens=max_tokens, seed=seed),
        )
    )


def drain(core: EngineCore) -> dict[str, list[RequestUpdate]]:
    news: dict[str, list[RequestUpdate]] = {}
    while core.has_work:
        for update in core.step():
            news.setdefault(update.request_id, []).append(update)
    core.check()
    return news


def test_a_request_runs_to_its_end() -> None:
    core = engine(ScriptedRunner())
    assert not core.has_work and core.step() == []
    add(core, "a")
    news = drain(core)["a"]
    assert [update.new_token_ids for update in news] == [(9,)] * 3
    assert [update.finish_reason for update in news] == [None, None, "length"]
    stats = core.stats()
    assert (stats.num_steps, stats.num_finished, stats.num_generated_tokens) == (3, 1, 3)
    assert (stats.num_prompt_tokens, stats.num_free_blocks, stats.num_blocks) == (3, 32, 32)


def test_stats_show_running_and_waiting() -> None:
    core = engine(ScriptedRunner())
    for name in "abc":
        add(core, name)
    assert (core.stats().num_running, core.stats().num_waiting) == (0, 3)
    core.step()
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (2, 1, 30)


def test_a_failing_step_ends_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    runner = ScriptedRunner()
    core = engine(runner)
    for name in "abc":
        add(core, name)
    runner.errors = [None, RuntimeError("bad kernel")]
    with caplog.at_level(logging.ERROR):
        news = drain(core)
    for name in "ab":
        assert news[name][-1].finish_reason == "error"
        assert news[name][-1].error == "the step failed: RuntimeError: bad kernel"
    assert [update.finish_reason for update in news["c"]] == [None, None, "length"]
    assert runner.plans[2].released_rows == [0, 1]
    assert core.stats().num_free_blocks == 32
    assert [record.message for record in caplog.records] == ["step 1 failed"]


def test_a_result_of_the_wrong_size_is_a_failed_step() -> None:
    runner = ScriptedRunner()
    runner.result = StepResult(token_ids=[9, 9])
    core = engine(runner)
    add(core, "a")
    [update] = drain(core)["a"]
    assert update.finish_reason == "error"
    assert update.error is not None and "samples 1 rows, but its result has 2" in update.error


def test_a_dead_runner_is_not_hidden_and_the_books_still_add_up() -> None:
    runner = ScriptedRunner()
    core = engine(runner)
    add(core, "a")
    runner.errors = [EngineDeadError("the device is gone")]
    with pytest.raises(EngineDeadError, match="the device is gone"):
        core.step()
    core.check()
    assert core.stats().num_free_blocks == 32


def test_the_queue_is_bounded() -> None:
    core = engine(ScriptedRunner(), max_num_queued=2)
    add(core, "a")
    add(core, "b")
    with pytest.raises(QueueFullError, match="2 requests wait and the limit is 2"):
        add(core, "c")
    core.step()
    add(core, "c")
    assert set(drain(core)) == {"a", "b", "c"}


def test_an_id_can_be_used_again_only_when_it_is_over() -> None:
    core = engine(ScriptedRunner())
    add(core, "a")
    with pytest.raises(InvalidRequestError, match="'a' is being served") as caught:
        add(core, "a")
    assert caught.value.param == "request_id"
    drain(core)
    add(core, "a")
    assert len(drain(core)["a"]) == 3


def test_a_refused_request_leaves_nothing() -> None:
    core = engine(ScriptedRunner())
    with pytest.raises(InvalidRequestError, match="make 43"):
        add(core, "a", max_tokens=40)
    assert not core.has_work
    add(core, "a")


def test_abort() -> None:
    core = engine(ScriptedRunner())
    add(core, "a")
    add(core, "b")
    core.step()
    update = core.abort("a")
    assert update is not None and update.finish_reason == "abort"
    assert core.abort("a") is None and core.abort("never") is None
    assert set(drain(core)) == {"b"}


def test_seeds_come_from_the_request_or_from_the_engine_seed() -> None:
    def seeds(engine_seed: int) -> list[int]:
        runner = ScriptedRunner()
        core = engine(runner, seed=engine_seed)
        add(core, "a")
        add(core, "b", seed=5)
        core.step()
        return [new.seed for new in runner.plans[0].new_rows]

    assert seeds(1) == seeds(1)
    assert seeds(1)[1] == 5
    assert seeds(1)[0] != seeds(2)[0]


def test_end_tokens_beyond_the_logits_are_not_handed_to_the_runner() -> None:
    runner = ScriptedRunner()
    core = engine(runner)
    add(core, "a")
    core.step()
    assert runner.plans[0].new_rows[0].stop_token_ids == (0,)


def test_a_stuck_scheduler_is_loud() -> None:
    core = engine(ScriptedRunner())
    add(core, "a")
    core._scheduler.rows._free.clear()  # as a lost row would
    with pytest.raises(EngineDeadError, match="1 requests wait and none runs"):
        core.step()


def test_the_engine_imports_no_torch() -> None:
    code = "import sys, llmc.engine.core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
