"""EngineCore: steps ahead, faults that stay where they belong, a bounded queue, right books."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping

import pytest
from pending import DoneStep

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest, RequestUpdate
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import EagerReason, StepPlan, StepResult
from llmc.engine.request import Request
from llmc.errors import EngineDeadError, InvalidRequestError, QueueFullError
from llmc.sampling_params import SamplingParams
from llmc.structured_outputs import StructuredOutputsParams


class ScriptedRunner:
    """Draws token 9, or raises what is next in `errors`."""

    def __init__(self, max_in_flight: int = 1) -> None:
        self.plans: list[StepPlan] = []
        self.errors: list[Exception | None] = []
        self.refusals: list[Exception | None] = []  # raised by `submit` itself
        self.result: StepResult | None = None
        self.token = 9
        self.max_in_flight = max_in_flight
        self.num_runtime_compiles = 0
        self.eager_steps: Mapping[EagerReason, int] = {}

    def use_idle_time(self, *, has_work: bool = False) -> bool:
        return False

    def submit(self, plan: StepPlan) -> DoneStep:
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        self.plans.append(plan)
        error = self.errors.pop(0) if self.errors else None
        samples = sum(work.sample for work in plan.work)
        return DoneStep(error or self.result or StepResult(token_ids=[self.token] * samples))


def engine(
    runner: ScriptedRunner,
    max_num_queued: int | None = None,
    seed: int = 0,
    async_scheduling: bool = True,
) -> EngineCore:
    return EngineCore(
        runner,
        EngineLimits(
            num_blocks=32,
            block_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=32,
            vocab_size=10,
            max_num_queued=max_num_queued,
        ),
        EngineFeatures(eos_token_ids=[0], seed=seed, async_scheduling=async_scheduling),
    )


def add(
    core: EngineCore,
    request_id: str,
    max_tokens: int = 3,
    seed: int | None = None,
    structured: StructuredOutputsParams | None = None,
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=structured)
    core.add(AddRequest(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling=sampling))


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(32, 4), (16, 32)])
def test_a_request_for_a_larger_engine_is_refused(max_model_len: int, num_blocks: int) -> None:
    """As a frontend may send after the engine was restarted with less memory."""
    core = EngineCore(
        ScriptedRunner(),
        EngineLimits(
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=max_model_len,
            vocab_size=10,
        ),
        EngineFeatures(),
    )
    with pytest.raises(InvalidRequestError, match="can grow to 18 tokens, but this engine has"):
        add(core, "long", max_tokens=15)
    add(core, "short", max_tokens=3)
    while core.has_work:
        core.step()
    core.check()
    assert core.stats().num_finished == 1


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


def test_without_tokens_only_the_prompt_is_computed() -> None:
    runner = ScriptedRunner()
    runner.token = 0  # the end token, which must not count
    core = engine(runner)
    # a grammar that one token completes: there is no compiler here, so it must not be asked
    add(core, "a", max_tokens=0, structured=StructuredOutputsParams(choice=["x"]))
    add(core, "b", max_tokens=0)
    for [update] in drain(core).values():
        assert (update.new_token_ids, update.finish_reason) == ((), "length")
    stats = core.stats()
    assert (stats.num_steps, stats.num_generated_tokens, stats.num_prompt_tokens) == (1, 0, 6)


def test_stats_show_running_and_waiting() -> None:
    core = engine(ScriptedRunner())
    for name in "abc":
        add(core, name)
    assert (core.stats().num_running, core.stats().num_waiting) == (0, 3)
    core.step()
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (2, 1, 30)


def test_a_step_that_fails_once_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    runner = ScriptedRunner()
    core = engine(runner)
    for name in "abc":
        add(core, name)
    runner.errors = [None, RuntimeError("bad kernel")]
    with caplog.at_level(logging.ERROR):
        news = drain(core)
    for name in "abc":
        assert [update.finish_reason for update in news[name]] == [None, None, "length"]
    assert runner.plans[2].released_rows == [0, 1]
    assert [record.message for record in caplog.records] == ["step 1 of 2 requests failed"]
    stats = core.stats()
    assert (stats.num_free_blocks, stats.num_failed_steps, stats.num_finished) == (32, 1, 3)


def test_a_request_that_fails_alone_ends_with_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    runner = ScriptedRunner()
    core = engine(runner)
    add(core, "a")
    runner.errors = [None, RuntimeError("bad kernel")]
    with caplog.at_level(logging.ERROR):
        news = drain(core)["a"]
    assert [update.finish_reason for update in news] == [None, "error"]
    assert news[-1].error == "the step failed: RuntimeError: bad kernel"
    assert [record.message for record in caplog.records] == [
        "step 1 of 1 requests failed",
        "ended request 'a' because it makes steps fail",
    ]


@pytest.mark.parametrize(("async_scheduling", "depth"), [(True, 3), (False, 1)])
def test_steps_are_submitted_ahead_up_to_what_the_runner_takes(
    async_scheduling: bool, depth: int
) -> None:
    runner = ScriptedRunner(max_in_flight=3)
    core = engine(runner, async_scheduling=async_scheduling)
    add(core, "a", max_tokens=8)
    [update] = core.step()
    assert update.new_token_ids == (9,) and len(runner.plans) == depth
    core.step()
    assert len(runner.plans) == depth + 1
    assert len(drain(core)["a"]) == 6 and len(runner.plans) == 8
    assert core.stats().num_wasted_row_steps == 0  # an end by length is known beforehand


def test_an_end_that_only_the_host_sees_wastes_one_row_step() -> None:
    runner = ScriptedRunner(max_in_flight=2)
    core = engine(runner)
    add(core, "a", max_tokens=8)
    runner.token = 0
    [update] = core.step()
    assert update.finish_reason == "stop" and len(runner.plans) == 2
    assert core.has_work and core.step() == [] and not core.has_work
    stats = core.stats()
    assert (stats.num_wasted_row_steps, stats.num_steps, stats.num_free_blocks) == (1, 2, 32)
    core.check()


def test_a_result_of_the_wrong_size_is_a_failed_step() -> None:
    runner = ScriptedRunner()
    runner.result = StepResult(token_ids=[9, 9])
    core = engine(runner)
    add(core, "a")
    [update] = drain(core)["a"]
    assert update.finish_reason == "error"
    assert update.error is not None and "its result has 2 tokens, 0 logprobs" in update.error


def test_a_step_that_cannot_be_submitted_is_a_failed_step(caplog: pytest.LogCaptureFixture) -> None:
    """The second of two in flight is refused; later all are."""
    caplog.set_level(logging.CRITICAL, "llmc.engine.core")
    runner = ScriptedRunner(max_in_flight=2)
    runner.refusals = [None, RuntimeError("no thread")]
    core = engine(runner)
    add(core, "a", max_tokens=8)
    add(core, "b", max_tokens=8)
    done = drain(core)
    assert [len(done[name]) for name in "ab"] == [8, 8]
    assert core.stats().num_failed_steps == 1
    core.check()
    runner.refusals = [RuntimeError("no thread")] * 9
    add(core, "c")
    add(core, "d")
    for updates in drain(core).values():
        assert [update.error for update in updates] == ["the step failed: RuntimeError: no thread"]
    core.check()
    assert core.stats().num_free_blocks == 32


def test_a_result_that_cannot_be_processed_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step did not fail, and a later one is in flight: bisecting it would find no culprit."""
    core = engine(ScriptedRunner(max_in_flight=2))
    add(core, "a", max_tokens=8)
    core.step()
    monkeypatch.setattr(Request, "append", lambda *args: 1 / 0)
    with pytest.raises(EngineDeadError, match="step 1 could not be processed: ZeroDivisionError"):
        core.step()


@pytest.mark.parametrize("first", [[], [RuntimeError("bad kernel")]], ids=["itself", "behind"])
def test_a_dead_runner_is_not_hidden_and_the_books_still_add_up(first: list[Exception]) -> None:
    runner = ScriptedRunner(max_in_flight=3)
    core = engine(runner)
    add(core, "a")
    runner.errors = [*first, EngineDeadError("the device is gone"), RuntimeError("behind")]
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
    with pytest.raises(InvalidRequestError, match="not available in this engine"):
        add(core, "a", structured=StructuredOutputsParams(json_object=True))
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
    core.scheduler.rows._free.clear()  # as a lost row would
    with pytest.raises(EngineDeadError, match="1 requests waiting, none running"):
        core.step()


def test_the_engine_imports_no_torch() -> None:
    code = "import sys, llmc.engine.core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
