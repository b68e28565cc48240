"""Scheduler: what a step takes, in which order, and what stops a request. No runner here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import StepPlan, StepResult, TokenLogprobs
from llmc.engine.request import Request, RequestState
from llmc.engine.scheduler import Scheduler
from llmc.sampling_params import SamplingParams

EOS = 0


def request(
    request_id: str,
    prompt: Sequence[int],
    total: int = 64,
    stop: Sequence[int] = (),
    **sampling: Any,
) -> Request:
    return Request(
        request_id=request_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=None, **sampling),
        seed=1,
        max_total_tokens=total,
        eos_token_ids=frozenset({EOS}),
        stop_token_ids=frozenset({EOS, *stop}),
    )


def scheduler(
    num_blocks: int = 64, block_size: int = 4, rows: int = 4, budget: int = 32, caching: bool = True
) -> Scheduler:
    return Scheduler(
        EngineLimits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=4096,
            vocab_size=100,
        ),
        EngineFeatures(enable_prefix_caching=caching),
    )


def planned(engine: Scheduler) -> StepPlan:
    plan = engine.schedule()
    assert plan is not None
    return plan


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(work.row, work.start, work.num_tokens, work.sample) for work in plan.work]


def finish_step(engine: Scheduler, plan: StepPlan, token: int | None = 9) -> list[str | None]:
    """Every sampling row draws `token`; returns the finish reasons."""
    count = sum(work.sample for work in plan.work)
    updates = engine.update(plan, StepResult(token_ids=[token] * count))
    return [update.finish_reason for update in updates]


def test_decodes_come_first_then_prompts_within_the_budget() -> None:
    engine = scheduler(budget=8)
    engine.add(request("a", [1] * 3))
    engine.add(request("b", [2] * 12))
    first = planned(engine)
    assert shape(first) == [(0, 0, 3, True), (1, 0, 5, False)]
    assert [new.request_id for new in first.new_rows] == ["a", "b"]
    finish_step(engine, first)
    engine.add(request("c", [3] * 4))
    second = planned(engine)
    assert shape(second) == [(0, 3, 1, True), (1, 5, 7, True)]
    finish_step(engine, second)
    assert shape(planned(engine)) == [(0, 4, 1, True), (1, 12, 1, True), (2, 0, 4, True)]


def test_the_first_work_brings_the_blocks_of_the_whole_prompt() -> None:
    engine = scheduler(budget=4)
    engine.add(request("a", [1] * 9))
    plan = planned(engine)
    assert plan.work[0].new_blocks == [0, 1, 2]
    finish_step(engine, plan)
    assert not planned(engine).work[0].new_blocks


def test_a_decode_gets_a_block_when_the_last_is_full() -> None:
    engine = scheduler()
    engine.add(request("a", [1] * 3))
    gained = []
    for _ in range(6):
        plan = planned(engine)
        gained.append(list(plan.work[0].new_blocks))
        finish_step(engine, plan)
    assert gained == [[0], [], [1], [], [], []]


def test_rows_are_bounded_reused_and_announced() -> None:
    engine = scheduler(rows=1)
    engine.add(request("a", [1, 2]))
    engine.add(request("b", [3, 4]))
    plan = planned(engine)
    assert len(plan.work) == 1 and plan.released_rows == []
    assert finish_step(engine, plan, EOS) == ["stop"]
    plan = planned(engine)
    assert plan.released_rows == [0] and plan.new_rows[0].row == 0
    finish_step(engine, plan)
    assert planned(engine).released_rows == []


def test_an_identical_prompt_reuses_all_full_blocks_but_computes_a_token() -> None:
    engine = scheduler()
    for name in "ab":
        engine.add(request(name, [5] * 8, total=9))
        plan = planned(engine)
        updates = engine.update(plan, StepResult(token_ids=[9]))
    assert shape(plan) == [(0, 4, 4, True)]
    assert plan.work[0].new_blocks[0] == 0
    assert updates[0].num_cached_tokens == 4
    assert (engine.pool.num_queries, engine.pool.num_hits) == (16, 4)


def test_generated_blocks_serve_the_next_turn() -> None:
    engine = scheduler(block_size=2)
    engine.add(request("a", [5, 6], total=7))
    while engine.has_work:
        finish_step(engine, planned(engine))
    engine.add(request("b", [5, 6, 9, 9, 9, 9, 1]))
    assert shape(planned(engine)) == [(0, 6, 1, True)]


def test_salts_keep_prefixes_apart() -> None:
    engine = scheduler()
    for salt in (b"one", b"two"):
        one = request(salt.decode(), [5] * 8, total=9)
        one.cache_salt = salt
        engine.add(one)
        plan = planned(engine)
        finish_step(engine, plan)
        assert plan.work[0].start == 0


def test_the_latest_arrival_is_preempted_and_resumes_with_its_tokens() -> None:
    engine = scheduler(num_blocks=4, block_size=2, caching=False)
    engine.add(request("a", [1, 1], total=8))
    engine.add(request("b", [2], total=8))
    for _ in range(3):
        finish_step(engine, planned(engine))
    # a: 5 tokens, needs its third block; b: 4 tokens in two blocks
    plan = planned(engine)
    assert [work.row for work in plan.work] == [0] and engine.num_preemptions == 1
    assert plan.released_rows == [1]
    assert engine.requests["b"].state is RequestState.PREEMPTED
    engine.add(request("c", [3], total=8))
    assert finish_step(engine, plan, EOS) == ["stop"]
    plan = planned(engine)
    assert [new.request_id for new in plan.new_rows] == ["b", "c"]
    assert plan.new_rows[0].token_ids == (2, 9, 9, 9)
    assert plan.new_rows[0].num_prompt_tokens == 1
    assert shape(plan)[0] == (0, 0, 4, True)


def test_a_newcomer_leaves_each_running_request_a_block() -> None:
    engine = scheduler(num_blocks=4, block_size=2, caching=False)
    engine.add(request("a", [1, 1], total=8))
    finish_step(engine, planned(engine))
    engine.add(request("b", [2, 2, 2, 2], total=6))
    plan = planned(engine)  # a takes its second block; two are left, b needs two, a its third
    assert [work.row for work in plan.work] == [0] and engine.pool.num_free == 2
    assert engine.abort("a") is not None
    finish_step(engine, plan)
    assert [new.request_id for new in planned(engine).new_rows] == ["b"]


def test_in_flight_tokens_advance_the_plan() -> None:
    engine = scheduler()
    engine.add(request("a", [1, 2], total=5))
    plans = [planned(engine) for _ in range(3)]
    assert [shape(plan) for plan in plans] == [
        [(0, 0, 2, True)],
        [(0, 2, 1, True)],
        [(0, 3, 1, True)],
    ]
    assert engine.schedule() is None  # the fifth token is in flight and is the last
    assert [finish_step(engine, plan) for plan in plans] == [[None], [None], ["length"]]
    assert not engine.has_work
    engine.check()


def test_a_stop_drops_one_row_step_and_then_frees_the_row() -> None:
    engine = scheduler(rows=1)
    engine.add(request("a", [1, 2]))
    engine.add(request("b", [3, 4]))
    first, second = planned(engine), planned(engine)
    assert finish_step(engine, first, EOS) == ["stop"]
    engine.check()
    assert engine.schedule() is None  # the only row is still in use by the second step
    assert finish_step(engine, second, 7) == []
    third = planned(engine)
    assert third.released_rows == [0] and third.new_rows[0].request_id == "b"


def test_preemption_waits_for_blocks_on_their_way_instead_of_taking_more() -> None:
    engine = scheduler(num_blocks=6, block_size=2, caching=False)
    for name, prompt in (("a", [1, 1]), ("b", [2]), ("c", [3])):
        engine.add(request(name, prompt, total=12))
    pending = planned(engine)
    for _ in range(2):
        plan = planned(engine)
        finish_step(engine, pending)
        pending = plan
    # a 5th token each for a; six blocks: a, b and c hold two each. a takes c's, one step late.
    plan = planned(engine)
    assert engine.num_preemptions == 1 and [work.row for work in plan.work] == [1]
    finish_step(engine, pending)
    assert len(engine.requests["c"].token_ids) == 4  # its token in flight counts
    after = planned(engine)
    assert engine.num_preemptions == 1 and after.work[0].row == 0
    engine.check()


def test_results_must_come_in_order() -> None:
    engine = scheduler()
    engine.add(request("a", [1, 2]))
    first, second = planned(engine), planned(engine)
    with pytest.raises(ValueError, match="step 1 is not the oldest"):
        engine.update(second, StepResult(token_ids=[9]))
    with pytest.raises(ValueError, match="draws 1 tokens and scores 0, but its result has 2"):
        engine.update(first, StepResult(token_ids=[9, 9]))
    assert finish_step(engine, first) == [None]


@pytest.mark.parametrize(
    ("token", "reason", "stop_reason"), [(EOS, "stop", None), (5, "stop", 5), (6, None, None)]
)
def test_stop_tokens(token: int, reason: str | None, stop_reason: int | None) -> None:
    engine = scheduler()
    engine.add(request("a", [1, 2], stop=[5]))
    [update] = engine.update(planned(engine), StepResult(token_ids=[token]))
    assert (update.finish_reason, update.stop_reason) == (reason, stop_reason)
    assert update.new_token_ids == (token,)


def test_no_stop_before_min_tokens_even_if_the_runner_draws_one() -> None:
    engine = scheduler()
    engine.add(request("a", [1, 2], min_tokens=2))
    assert [finish_step(engine, planned(engine), EOS) for _ in range(3)] == [
        [None],
        [None],
        ["stop"],
    ]


def test_a_row_without_a_token_fails_alone_and_its_blocks_are_not_shared() -> None:
    engine = scheduler(block_size=2)
    engine.add(request("a", [1, 1, 1, 1, 1]))
    engine.add(request("b", [2, 2, 2]))
    updates = engine.update(planned(engine), StepResult(token_ids=[None, 9]))
    assert [(u.request_id, u.finish_reason) for u in updates] == [("a", "error"), ("b", None)]
    assert updates[0].error is not None and "not finite" in updates[0].error
    engine.add(request("again", [1, 1, 1, 1, 1]))
    plan = planned(engine)
    assert shape(plan)[1] == (0, 0, 5, True)
    engine.check()


def test_a_request_that_allows_few_tokens_is_told_that_none_is_left() -> None:
    engine = scheduler()
    engine.add(request("a", [1, 2, 3], allowed_token_ids=[5], bad_words_token_ids=[[5]]))
    [update] = engine.update(planned(engine), StepResult(token_ids=[None]))
    assert update.error is not None
    assert update.error.startswith("no token was left to sample: all allowed_token_ids are banned")


def test_chunks_published_before_the_failure_are_forgotten() -> None:
    engine = scheduler(block_size=2, budget=4)
    engine.add(request("a", [1] * 6))
    finish_step(engine, planned(engine))
    assert finish_step(engine, planned(engine), None) == ["error"]
    engine.add(request("again", [1] * 6))
    assert planned(engine).work[0].start == 0


def test_logprobs_are_passed_on() -> None:
    engine = scheduler()
    engine.add(request("a", [1, 2]))
    engine.add(request("b", [1, 2]))
    logprob = TokenLogprobs(token_id=9, logprob=-0.5, rank=1)
    result = StepResult(token_ids=[9, 9], logprobs=[logprob, None])
    updates = engine.update(planned(engine), result)
    assert [tuple(update.logprobs) for update in updates] == [(logprob,), ()]


def test_a_failed_step_is_run_again_by_halves_and_repeats_its_news() -> None:
    engine = scheduler(rows=2)
    engine.add(request("a", [1, 2]))
    finish_step(engine, planned(engine), EOS)
    for name in "bcd":
        engine.add(request(name, [3]))
    plan = planned(engine)
    assert plan.released_rows == [0]
    for names in ("bc", "b"):  # all of them, then the first half
        assert engine.fail(plan, "boom") == []
        engine.check()
        plan = planned(engine)
        assert [new.request_id for new in plan.new_rows] == list(names)
        assert plan.released_rows == [0, 1]
    [update] = engine.fail(plan, "boom")
    assert (update.request_id, update.finish_reason, update.error) == ("b", "error", "boom")
    plan = planned(engine)
    assert [new.request_id for new in plan.new_rows] == ["c"]
    assert engine.schedule() is None  # one step at a time, and no other request
    finish_step(engine, plan)
    plan = planned(engine)  # c is cleared
    assert [new.request_id for new in plan.new_rows] == ["d"] and len(plan.work) == 2
    engine.check()


def test_abort_in_every_state() -> None:
    engine = scheduler(rows=1)
    engine.add(request("a", [1, 2]))
    engine.add(request("b", [3, 4]))
    plan = planned(engine)
    for name in "ba":
        update = engine.abort(name)
        assert update is not None and update.finish_reason == "abort"
        assert engine.abort(name) is None
    engine.check()
    assert engine.has_work  # the step in flight
    assert finish_step(engine, plan) == []
    assert not engine.has_work and engine.pool.num_free == engine.pool.num_blocks
    engine.check()


def test_what_can_never_fit_is_refused() -> None:
    engine = scheduler(num_blocks=2, block_size=4)
    with pytest.raises(ValueError, match="can grow to 9 tokens; the pool holds 2 blocks of 4"):
        engine.add(request("a", [1], total=9))
    engine.add(request("b", [1], total=8))
    with pytest.raises(ValueError, match="'b' already exists"):
        engine.add(request("b", [1], total=8))


def test_check_finds_a_lost_row_and_a_lost_request() -> None:
    engine = scheduler()
    engine.add(request("a", [1, 2]))
    planned(engine)
    engine.check()
    row = engine.running.pop()
    with pytest.raises(AssertionError, match="running requests own rows"):
        engine.check()
    engine.running.append(row)
    engine.rows._free.append(0)
    with pytest.raises(AssertionError, match="free rows"):
        engine.check()
