"""Swap: kept in host memory where that is cheaper, and never what can't be trusted."""

from __future__ import annotations

import logging

import pytest
from fake_runner import FakeRunner, Outcome, run, run_alone

from llmc.engine.core import EngineCore
from llmc.engine.kv.layout import WHOLE, AttentionWindow, CacheLayout
from llmc.engine.kv.prefix_cache import NO_BLOCK
from llmc.engine.kv.swap import SwapConfig, SwapCost, Swapper
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.request import BlockTable, Request, RequestState
from llmc.sampling_params import SamplingParams

CHEAP = SwapCost(prefill_seconds_per_token=1.0, block_bytes=1, copy_bytes_per_second=1e9)
DEAR = SwapCost(prefill_seconds_per_token=1.0, block_bytes=10, copy_bytes_per_second=1.0)


def engine(swap: SwapConfig | None, depth: int = 2) -> tuple[EngineCore, FakeRunner]:
    runner = FakeRunner(num_blocks=12, block_size=2, max_tokens=32, max_rows=4, max_in_flight=depth)
    core = EngineCore(
        runner,
        EngineLimits(
            num_blocks=12,
            block_size=2,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=24,
            vocab_size=9,
        ),
        EngineFeatures(eos_token_ids=[0], enable_prefix_caching=False, swap_config=swap),
    )
    return core, runner


def crowd(max_tokens: int = 12) -> list[AddRequest]:
    """Four that fit at first and then don't."""
    return [
        AddRequest(
            request_id=f"r{index}",
            prompt_token_ids=[index + 1, 2, 3, 4],
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=index),
        )
        for index in range(4)
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("swap", "swaps"),
    [(None, False), (SwapConfig(24, CHEAP), True), (SwapConfig(12, DEAR), False)],
    ids=["none", "cheap", "dear"],
)
def test_whatever_is_cheaper_is_done_and_the_answers_are_the_same(
    swap: SwapConfig | None, swaps: bool, depth: int
) -> None:
    core, runner = engine(swap, depth)
    for message in crowd():
        core.add(message)
    outcomes = run(core)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_swaps == (stats.num_preemptions if swaps else 0)
    assert (runner.num_swapped_in > 0) == swaps
    for seed, message in enumerate(crowd()):
        assert outcomes[message.request_id] == run_alone(message, seed, room=24)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("window", [AttentionWindow(window=5), AttentionWindow(chunk=4)])
def test_requests_with_attention_windows_are_swapped_without_what_left_them(
    window: AttentionWindow, caching: bool
) -> None:
    """Layers of both kinds, in blocks of one pool; the cost counts only blocks that are there."""
    windows = (WHOLE, window)
    runner = FakeRunner(
        num_blocks=24, block_size=2, max_tokens=8, max_rows=4, max_in_flight=2,
        layout=CacheLayout(block_size=2, step_tokens=8, windows=windows),
    )  # fmt: skip
    limits = EngineLimits(
        num_blocks=24, block_size=2, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32,
        vocab_size=9,
    )  # fmt: skip
    core = EngineCore(
        runner,
        limits,
        EngineFeatures(
            eos_token_ids=[0],
            enable_prefix_caching=caching,
            windows=windows,
            swap_config=SwapConfig(48, CHEAP),
        ),
    )
    for message in crowd(20):
        core.add(message)
    outcomes = run(core)
    core.check()
    assert core.stats().num_swaps == core.stats().num_preemptions > 0
    assert runner.num_computed == 4 * (4 + 20 - 1), "nothing was computed twice"
    assert 0 < runner.num_swapped_in < core.stats().num_swaps * 2 * 12
    for seed, message in enumerate(crowd(20)):
        assert outcomes[message.request_id] == run_alone(message, seed, room=32)


def test_blocks_that_left_a_window_take_no_slots() -> None:
    swapper = Swapper(SwapConfig(3, CHEAP), block_size=2)
    one = saved("a", 6, [5, NO_BLOCK, 6, NO_BLOCK, 7, 8])
    one.table.num_freed = [0, 2]
    swapper.save(one)
    assert not swapper.holds(one), "four blocks do not fit into three slots"
    swapper = Swapper(SwapConfig(4, CHEAP), block_size=2)
    swapper.save(one)
    _, out, _ = swapper.pop()
    assert [copy.source for copy in out] == [5, 6, 7, 8]
    found = swapper.find(one, num_computed=2)
    assert found is not None and found.num_freed == (0, 2)
    one.table.blocks = [1, NO_BLOCK, 2, NO_BLOCK, 3, 4]
    assert swapper.restore(one, num_shared=2, num_computed=2) == 6
    assert [copy.target for copy in swapper.pop()[2]] == [2, 3, 4]
    swapper.check([])


def test_nothing_is_computed_twice() -> None:
    computed = {}
    for swap in (None, SwapConfig(24, CHEAP)):
        core, runner = engine(swap)
        for message in crowd():
            core.add(message)
        run(core)
        computed[swap is None] = runner.num_computed
    assert computed[False] == 4 * (4 + 12 - 1) < computed[True]


def test_too_little_host_memory_falls_back_to_recomputing() -> None:
    core, _ = engine(SwapConfig(3, CHEAP))
    for message in crowd():
        core.add(message)
    outcomes = run(core)
    assert core.stats().num_swaps < core.stats().num_preemptions
    assert all(outcome.finish_reason == "length" for outcome in outcomes.values())


def test_an_aborted_request_gives_its_slots_back() -> None:
    core, _ = engine(SwapConfig(24, CHEAP))
    for message in crowd():
        core.add(message)
    while not core.stats().num_swaps:
        core.step()
    swap = core.scheduler.rows.swap
    assert swap is not None
    swapped = [r for r in core.scheduler.waiting if swap.holds(r)]
    core.abort(swapped[0].request_id)
    core.check()  # of the slots too
    run(core)


def test_a_copy_in_a_failed_step_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "llmc.engine.core")
    core, runner = engine(SwapConfig(24, CHEAP), depth=1)
    for message in crowd():
        core.add(message)
    outcomes: dict[str, Outcome] = {}
    while not core.stats().num_failed_steps:
        runner.fail_at_swap = True
        for update in core.step():
            outcomes.setdefault(update.request_id, Outcome()).take(update)
    swap = core.scheduler.rows.swap
    assert swap is not None and not any(map(swap.holds, core.scheduler.waiting))
    for name, outcome in run(core).items():
        outcomes[name].tokens += outcome.tokens
    for seed, message in enumerate(crowd()):
        assert outcomes[message.request_id].tokens == run_alone(message, seed, room=24).tokens


def saved(name: str, num_computed: int, blocks: list[int]) -> Request:
    return Request(
        request_id=name,
        token_ids=[1] * (num_computed + 1),
        num_prompt_tokens=1,
        sampling=SamplingParams(),
        seed=0,
        max_total_tokens=99,
        state=RequestState.PREEMPTED,
        num_computed=num_computed,
        table=BlockTable(blocks=blocks, num_freed=[0]),
    )


def test_a_slot_emptied_by_a_plan_is_free_for_the_next_one_only() -> None:
    swapper = Swapper(SwapConfig(2, CHEAP), block_size=2)
    one, other = saved("a", 3, [5, 6, 7]), saved("b", 3, [8, 9])
    swapper.save(one)
    request, out, back = swapper.pop()
    assert request == [one] and [(c.source, c.target) for c in out] == [(5, 0), (6, 1)]
    assert back == []
    one.table.blocks = [3, 2, 1]
    assert swapper.restore(one, num_shared=1, num_computed=2) == 3
    swapper.save(other)
    assert not swapper.holds(other)  # recomputed: its copy would come before the other's return
    _, out, back = swapper.pop()
    assert out == [] and [(c.source, c.target) for c in back] == [(1, 2)]
    swapper.save(other)
    assert swapper.holds(other)
    swapper.drop(other)
    assert swapper.pop() == ([], [], [])
    swapper.check([])


def test_what_the_prefix_cache_holds_is_not_copied_back() -> None:
    swapper = Swapper(SwapConfig(2, CHEAP), block_size=2)
    one = saved("a", 3, [5, 6])
    swapper.save(one)
    assert swapper.restore(one, num_shared=2, num_computed=4) == 4
    assert swapper.pop()[2] == []


def test_check_finds_a_lost_slot() -> None:
    swapper = Swapper(SwapConfig(2, CHEAP), block_size=2)
    one = saved("a", 3, [5, 6])
    swapper.save(one)
    swapper.check([one])
    with pytest.raises(AssertionError, match="are kept for"):
        swapper.check([])


def test_the_cost_weighs_tokens_against_copies_both_ways() -> None:
    cost = SwapCost(prefill_seconds_per_token=0.5, block_bytes=100, copy_bytes_per_second=100.0)
    assert cost.is_cheaper(num_tokens=9, num_blocks=2)
    assert not cost.is_cheaper(num_tokens=8, num_blocks=2)
