"""Layers that see a window give their blocks back: memory, prefix cache, forks, and the end."""

from __future__ import annotations

import pytest
import torch
from fake_runner import EOS, VOCAB, FakeRunner, run_alone

from llmc.engine.core import EngineCore
from llmc.engine.kv.layout import WHOLE, AttentionWindow, CacheLayout
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.kernels.attention import first_visible, visible
from llmc.sampling_params import SamplingParams

SIZE, STEP = 4, 8
WINDOW = AttentionWindow(window=6)


def engine(
    windows: tuple[AttentionWindow, ...],
    num_blocks: int,
    *,
    depth: int = 1,
    caching: bool = True,
    long_context_from: int | None = None,
) -> tuple[EngineCore, FakeRunner]:
    layout = CacheLayout(block_size=SIZE, step_tokens=STEP, windows=windows)
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=SIZE,
        max_tokens=STEP,
        max_rows=4,
        max_in_flight=depth,
        layout=layout,
    )
    core = EngineCore(
        runner,
        EngineLimits(
            num_blocks=num_blocks,
            block_size=SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=STEP,
            max_model_len=1000,
            vocab_size=VOCAB,
        ),
        EngineFeatures(
            eos_token_ids=[EOS],
            enable_prefix_caching=caching,
            windows=windows,
            long_context_from=long_context_from,
        ),
    )
    return core, runner


def ask(name: str, num_prompt: int, max_tokens: int, **kwargs: str) -> AddRequest:
    prompt = [1 + i % 7 for i in range(num_prompt)]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    return AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, **kwargs)


def finish(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        for update in core.step():
            assert update.error is None, update.error
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
    core.check()
    return tokens


@pytest.mark.parametrize(
    "window",
    [WHOLE, AttentionWindow(window=1), AttentionWindow(window=5), AttentionWindow(chunk=4)],
)
def test_what_a_token_sees_is_what_the_kernels_say(window: AttentionWindow) -> None:
    for position in range(20):
        seen = visible(
            torch.arange(position, 20), torch.arange(20), window.window, window.chunk
        ).any(0)
        first = int(seen.nonzero()[0])
        assert window.first_visible(position) == first
        assert first_visible(position, window.window, window.chunk) == first


def test_a_layout_says_how_much_a_sequence_holds() -> None:
    whole = CacheLayout(block_size=SIZE, step_tokens=STEP)
    assert [whole.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert whole.longest(3) == 12 and whole.longest(0) == 0
    mixed = CacheLayout(block_size=SIZE, step_tokens=STEP, windows=(WHOLE, WINDOW, WINDOW))
    assert mixed.blocks_for(8) == 6  # nothing has left the window yet
    assert mixed.blocks_for(400) == 100 + 2 * 5  # a window of 6 and a step of 8, not aligned
    assert mixed.longest(110) == 400 and mixed.longest(109) == 396
    assert CacheLayout(block_size=SIZE, step_tokens=STEP, windows=(WINDOW,)).longest(5) == 2**31


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_request_needs_little_more_than_its_whole_layers(depth: int) -> None:
    windows = (WHOLE, WINDOW, WINDOW, WINDOW)
    core, runner = engine(windows, num_blocks=50 + 3 * 5, depth=depth)
    message = ask("a", 100, 100)
    core.add(message)  # 200 tokens in 4 groups would be 200 blocks
    assert finish(core) == {"a": run_alone(message, 0, 1000).tokens}
    assert core.stats().num_preemptions == 0
    assert runner.most_blocks <= 50 + 3 * 5


def test_a_model_of_windows_alone_serves_more_than_its_pool_holds() -> None:
    core, runner = engine((WINDOW,), num_blocks=5)
    message = ask("a", 300, 300)
    core.add(message)
    assert finish(core) == {"a": run_alone(message, 0, 1000).tokens}
    assert runner.most_blocks <= 5


def test_a_cached_prompt_is_found_where_its_window_is_still_there() -> None:
    core, runner = engine((WHOLE, WINDOW), num_blocks=60)
    core.add(ask("a", 40, 4))
    finish(core)
    computed = runner.num_computed
    core.add(ask("b", 40, 4))
    finish(core)
    # 9 blocks of 4 are full before the last token: what the window needs of them is there
    assert runner.num_computed - computed == (40 - 36) + 3
    core.add(ask("c", 22, 4))  # its windows ended elsewhere, and the pool had room to keep them
    finish(core)
    assert core.stats().prefix_cache_hits == 36 + 20


def test_an_evicted_window_shortens_what_is_found() -> None:
    core, _ = engine((WHOLE, WINDOW), num_blocks=20)
    core.add(ask("a", 40, 4))
    finish(core)
    pool = core.scheduler.pool
    pool.free([pool.allocate() for _ in range(pool.num_free - 8)])  # the oldest go
    message = ask("b", 40, 4)
    core.add(message)
    assert finish(core) == {"b": run_alone(message, 0, 1000).tokens}
    assert core.stats().prefix_cache_hits < 36


def test_forks_share_what_their_prompts_end_sees() -> None:
    core, runner = engine((WHOLE, WINDOW), num_blocks=60, caching=False)
    core.add(ask("a", 42, 8))
    for name in "bcd":
        core.add(ask(name, 42, 8, fork_of="a"))
    tokens = finish(core)
    assert len(tokens) == 4 and all(len(one) == 8 for one in tokens.values())
    assert runner.num_computed == 42 + 3 + 4 * 7  # the prompt once, its last token for each
    assert runner.num_copies == 3 * 2  # the block in which it ends, in both groups


@pytest.mark.parametrize("salt", ["y", "x\0long", "\xfe" + "x"])
def test_no_salt_makes_a_short_sequence_share_with_a_long_one(salt: str) -> None:
    """Their keys have other positions. The runner checks what is read."""
    core, runner = engine((WHOLE,), 16, long_context_from=8)
    runner.long_context_from = 8
    for name, one, num_prompt in (("long", "x", 12), ("short", salt, 6)):
        core.add(ask(name, num_prompt, 2, cache_salt=one))
        assert len(finish(core)[name]) == 2
    assert runner.num_long and not core.stats().prefix_cache_hits
