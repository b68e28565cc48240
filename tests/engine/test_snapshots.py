"""Snapshots of recurrent states: which are kept, which make room, and which must not be found."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from fake_runner import EOS, VOCAB, FakeRunner, Outcome, draw, history, run_alone

from llmc.engine.core import EngineCore
from llmc.engine.kv.block_pool import BlockPool
from llmc.engine.kv.snapshots import LEAST_BLOCKS, StateSnapshots
from llmc.engine.messages import AddRequest, Operate
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.request import Request
from llmc.sampling_params import SamplingParams

SIZE = 2
LEAST = LEAST_BLOCKS * SIZE  # 16 tokens
A, B, C, D = b"A", b"B", b"C", b"D"


def put(snapshots: StateSnapshots, digest: bytes) -> int:
    snapshot = snapshots.take()
    assert snapshot is not None
    snapshots.publish(snapshot, digest)
    return snapshot


def test_the_least_recently_used_makes_room_and_none_that_a_step_fills() -> None:
    snapshots = StateSnapshots(3, SIZE)
    of_a, of_b = put(snapshots, A), put(snapshots, B)
    filled = snapshots.take()
    assert snapshots.use(A) == of_a
    assert put(snapshots, C) == of_b
    assert [snapshots.longest([one]) for one in (A, B, C)] == [1, 0, 1]
    assert put(snapshots, D) == of_a and snapshots.take() == of_b
    assert snapshots.take() == of_a and snapshots.take() is None
    for snapshot in (0, 1, 2, filled):
        assert snapshot is not None
        snapshots.free(snapshot)  # the second time changes nothing
    snapshots.check([])
    assert snapshots.num_in_flight == 0


def test_the_longest_prefix_is_one_that_has_a_snapshot_at_its_end() -> None:
    snapshots = StateSnapshots(4, SIZE)
    put(snapshots, A)
    put(snapshots, C)
    assert [snapshots.longest([A, B, C, D][:n]) for n in range(5)] == [0, 1, 1, 3, 3]


def test_of_two_states_of_one_block_the_first_stays() -> None:
    snapshots = StateSnapshots(2, SIZE)
    first, second = snapshots.take(), snapshots.take()
    assert first is not None and second is not None
    for snapshot in (first, second):
        snapshots.publish(snapshot, A)
        snapshots.free(snapshot)
    assert snapshots.use(A) == first and snapshots.take() == second
    with pytest.raises(AssertionError, match="is not in the prefix cache"):
        snapshots.check([B])
    snapshots._free.append(first)
    with pytest.raises(AssertionError, match="used twice"):
        snapshots.check([A])


def test_a_snapshot_goes_with_its_block() -> None:
    pool = BlockPool(2, SIZE, num_snapshots=2)
    assert pool.snapshots is not None
    for way in ("evicted", "forgotten", "all forgotten"):
        digest = pool.chain_digest(pool.root_digest(), [1, 2])
        block = pool.allocate()
        pool.publish(block, digest)
        put(pool.snapshots, digest)
        pool.free([block])
        assert pool.snapshots.longest([digest]) == 1
        pool.check()
        if way == "evicted":
            pool.free([pool.allocate(), pool.allocate()])
        elif way == "forgotten":
            pool.forget([block])
        else:
            assert pool.reset_prefix_cache() == 1
        assert pool.snapshots.longest([digest]) == 0, way
        pool.check()


def stops(num_tokens: int, budget: int, *, start: int = 0, known_to: int = 0) -> list[int]:
    """Where a prompt's states are kept when each step has room for so many of its tokens."""
    sampling = SamplingParams()
    request = Request(
        request_id="a",
        token_ids=[1] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=sampling,
        seed=0,
        max_total_tokens=10**6,
    )
    snapshots = StateSnapshots(9, SIZE)
    request.num_computed = request.table.kept_at = start
    request.table.known_to = known_to
    kept = []
    while request.num_computed < num_tokens:
        end = min(request.num_computed + budget, num_tokens)
        stop = snapshots.stop_at(request, end)
        if stop is not None:
            assert request.num_computed < stop <= end and stop % SIZE == 0
            request.table.kept_at = stop
            kept.append(stop)
        request.num_computed = end if stop is None else stop
    return kept


def test_where_states_of_a_prompt_are_kept() -> None:
    assert stops(LEAST, 100) == []  # the last token is computed again anyway
    assert stops(LEAST + 1, 100) == [LEAST]
    assert stops(100, 1000) == [98] and stops(101, 1000) == [100]
    # the end of what others have computed too, and the prompt's own if it is far enough from there
    assert stops(101, 1000, known_to=40) == [40, 100]
    assert stops(101, 1000, known_to=90) == [90]
    assert stops(101, 1000, known_to=LEAST - SIZE) == [100]
    # nothing new after a prefix that was found
    assert stops(101, 1000, start=90) == [] and stops(101, 1000, start=60) == [100]
    # steps of a long prompt
    assert stops(1000, 33) == [32, 64, 130, 262, 526, 998]
    assert stops(1000, 1) == [16, 32, 64, 128, 256, 512, 998]


def engine(
    *, num_snapshots: int = 8, depth: int = 2, budget: int = 1000, num_blocks: int = 400
) -> tuple[EngineCore, FakeRunner]:
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=SIZE,
        max_tokens=budget,
        max_rows=4,
        max_in_flight=depth,
        has_states=True,
    )
    core = EngineCore(
        runner,
        EngineLimits(
            num_blocks=num_blocks,
            block_size=SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=1000,
            vocab_size=VOCAB,
        ),
        EngineFeatures(eos_token_ids=[EOS], share_prompts=False, num_snapshots=num_snapshots),
    )
    return core, runner


def ask(name: str, prompt: Sequence[int], max_tokens: int = 20) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    return AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)


def run(core: EngineCore, *messages: AddRequest) -> dict[str, Outcome]:
    for message in messages:
        core.add(message)
    outcomes = {message.request_id: Outcome() for message in messages}
    while core.has_work:
        for update in core.step():
            outcomes[update.request_id].take(update)
        core.check()
    return outcomes


def hits(core: EngineCore, message: AddRequest) -> int:
    before = core.stats().prefix_cache_hits
    assert run(core, message)[message.request_id].tokens == run_alone(message, 0, 1000).tokens
    return core.stats().prefix_cache_hits - before


PROMPT = [1 + i * i % 7 for i in range(41)]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_has_one_snapshot_which_moves_on(depth: int) -> None:
    core, _ = engine(depth=depth)
    assert hits(core, ask("a", PROMPT)) == 0
    snapshots = core.scheduler.pool.snapshots
    assert snapshots is not None and len(snapshots._snapshot_of) == 2  # its prompt's and its own
    answer = run_alone(ask("a", PROMPT), 0, 1000).tokens
    assert hits(core, ask("b", PROMPT)) == 40
    assert hits(core, ask("c", [*PROMPT, *answer, 5, 5])) == 60


def test_answers_leave_snapshots_to_prompts_where_many_run() -> None:
    core, _ = engine(num_snapshots=4)
    prompts = [[n, *PROMPT] for n in (1, 2, 3)]
    run(core, *(ask(str(n), prompt) for n, prompt in enumerate(prompts)))
    assert [hits(core, ask("again", prompt, 1)) for prompt in prompts] == [40, 40, 40]


def test_resetting_the_prefix_cache_forgets_states() -> None:
    core, _ = engine()
    hits(core, ask("a", PROMPT))
    assert core.run_operation(Operate(number=1, operation="reset_prefix_cache")).error is None
    assert hits(core, ask("b", PROMPT)) == 0
    core.release_caches()
    assert hits(core, ask("c", PROMPT)) == 0 and hits(core, ask("d", PROMPT)) == 40


def test_states_of_a_request_without_a_token_are_not_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "llmc.engine")
    core, runner = engine()
    runner.nan = True
    bad = without_token(PROMPT)
    assert run(core, ask("a", bad))["a"].finish_reason == "error"
    runner.nan = False
    assert hits(core, ask("b", bad)) == 0 and hits(core, ask("c", bad)) == 44
    # blocks that another has computed too stay, but not the state that was kept at their end
    runner.nan = True
    assert run(core, ask("d", without_token(PROMPT[:30])))["d"].finish_reason == "error"
    runner.nan = False
    assert hits(core, ask("e", [*PROMPT[:30], 8, 8])) == 0


def without_token(begin: Sequence[int]) -> list[int]:
    """A prompt that begins so and draws none."""
    prompts = ([*begin, n % 7, n // 7 % 7, n // 49 % 7, n // 343] for n in range(2000))
    return next(p for p in prompts if draw(history(p)[-1], 0, 0, 0, (), True) is None)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_failed_step_was_to_keep_is_not_found(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "llmc.engine")
    core, runner = engine(depth=depth)
    runner.poison = {"a": 20}  # in the step that ends after 40 tokens
    assert run(core, ask("a", PROMPT))["a"].finish_reason == "error"
    assert core.scheduler.pool.snapshots is not None and not runner.snapshots
    assert hits(core, ask("b", PROMPT)) == 0 and hits(core, ask("c", PROMPT)) == 40
