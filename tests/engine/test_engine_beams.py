"""Beam searches: what they find, the blocks that they hold, and that nothing of them stays."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence

import pytest
from fake_runner import EOS, VOCAB, FakeRunner, InjectedFault, history, likeliest

from llmc.engine.beam_search import BeamSearch
from llmc.engine.core import EngineCore
from llmc.engine.kv import snapshots
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.errors import InvalidRequestError
from llmc.sampling_params import BeamSearchParams, SamplingParams

SIZE = 4
ROOM = 400  # the context


def engine(
    *,
    num_blocks: int = 200,
    caching: bool = False,
    budget: int = 64,
    share: bool = True,
    rows: int = 8,
    depth: int = 2,
    num_snapshots: int = 0,
) -> tuple[EngineCore, FakeRunner]:
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=SIZE,
        max_tokens=budget,
        max_rows=rows,
        max_in_flight=depth,
        has_states=num_snapshots > 0,
    )
    core = EngineCore(
        runner,
        EngineLimits(
            num_blocks=num_blocks,
            block_size=SIZE,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=ROOM,
            vocab_size=VOCAB,
        ),
        EngineFeatures(
            eos_token_ids=[EOS],
            enable_prefix_caching=caching,
            share_prompts=share,
            num_snapshots=num_snapshots,
        ),
    )
    return core, runner


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [1 + (first + k * k) % 8 for k in range(length)]


def begin(core: EngineCore, prompt: Sequence[int], params: BeamSearchParams) -> BeamSearch:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos
    )
    name = f"search-{len(core.scheduler.requests)}"
    message = AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
    return core.search(message, params)


def run(core: EngineCore) -> None:
    for _ in range(20_000):
        if not core.has_work:
            break
        core.step()
        core.check()
    assert not core.has_work, "it does not end"
    assert core.stats().num_free_blocks == core.stats().num_blocks


def found(search: BeamSearch) -> list[tuple[tuple[int, ...], float]]:
    assert search.is_over and search.error is None
    return [(tuple(one.token_ids), round(one.cum_logprob, 6)) for one in search.finished]


def expected(
    prompt: Sequence[int], params: BeamSearchParams
) -> list[tuple[tuple[int, ...], float]]:
    """The same search over whole histories, written down once more."""
    width, ends = params.beam_width, () if params.ignore_eos else (EOS,)
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, float, tuple[int, ...]]] = []
    for length in range(1, params.max_tokens + 1):
        grown = []
        for total, tokens in beams:
            top = likeliest(history([*prompt, *tokens])[-1], VOCAB)
            for token, value in zip(top.top_token_ids, top.top_logprobs, strict=True):
                grown.append((total + value, (*tokens, token)))
        grown.sort(reverse=True)
        over = [g for g in grown[:width] if g[1][-1] in ends or length == params.max_tokens]
        done += [(g[0] / math.pow(length, params.length_penalty), *g) for g in over]
        done = sorted(done, reverse=True)[:width]
        beams = [g for g in grown[: 2 * width] if g[1][-1] not in ends][:width]
        window = params.max_tokens if params.early_stopping == "never" else length
        if params.length_penalty <= 0:
            window = length
        best = beams[0][0] / math.pow(window, params.length_penalty)
        if len(done) == width and (params.early_stopping is True or best <= done[-1][0]):
            break
    return [(tokens, round(total, 6)) for _, total, tokens in done]


PARAMS = [
    BeamSearchParams(beam_width=1, max_tokens=9),
    BeamSearchParams(beam_width=3, max_tokens=12),
    BeamSearchParams(beam_width=4, max_tokens=10, early_stopping=True),
    BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=2.0, early_stopping="never"),
    BeamSearchParams(beam_width=5, max_tokens=10, length_penalty=-1.0),
    BeamSearchParams(beam_width=6, max_tokens=9, length_penalty=0.0, ignore_eos=True),
    BeamSearchParams(beam_width=2, max_tokens=1),
]


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("budget", [64, 3], ids=["whole", "chunked"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "alone"])
def test_it_finds_what_a_plain_search_finds(share: bool, budget: int, depth: int) -> None:
    core, _ = engine(caching=depth == 1, budget=budget, depth=depth, share=share)
    ends = set()
    for params in PARAMS:
        for length in (1, 4, 13):
            prompt = prompt_of(length)
            search = begin(core, prompt, params)
            run(core)
            assert found(search) == expected(prompt, params), (params, length)
            ends |= {one.finish_reason for one in search.finished}
    assert ends == {"stop", "length"}


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("num_snapshots", [1, 3, 50])
def test_beams_of_a_model_with_states(
    num_snapshots: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beam that forks computes the other's tokens again, from the newest snapshot among them."""
    monkeypatch.setattr(snapshots, "LEAST_BLOCKS", 1)
    core, runner = engine(caching=True, depth=depth, share=False, num_snapshots=num_snapshots)
    for params in PARAMS:
        for length in (1, 13):
            search = begin(core, prompt_of(length), params)
            run(core)
            assert found(search) == expected(prompt_of(length), params), (params, length)
    assert runner.num_loaded > 0


@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("num_prompt", [200, 201, 203])
def test_eight_beams_hold_the_prompt_once(num_prompt: int, caching: bool) -> None:
    core, runner = engine(caching=caching)
    params = BeamSearchParams(beam_width=8, max_tokens=24, ignore_eos=True)
    prompt = prompt_of(num_prompt)
    search = begin(core, prompt, params)
    run(core)
    assert found(search) == expected(prompt, params)
    outputs = 8 * (-(-24 // SIZE) + 1)
    assert runner.most_blocks <= -(-num_prompt // SIZE) + outputs
    # each beam computes the prompt's last token and then one a step, wherever it forked from
    assert runner.num_computed <= num_prompt + 8 * 24
    assert runner.num_copies > 8 and core.stats().num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("rows", [4, 6])
@pytest.mark.parametrize("num_blocks", [9, 12, 16, 30])
def test_searches_that_compete_for_rows_and_blocks_all_end(
    num_blocks: int, rows: int, depth: int
) -> None:
    """They wait for each other; the last one gives way, and nothing stands still."""
    core, runner = engine(num_blocks=num_blocks, rows=rows, budget=7, depth=depth)
    params = BeamSearchParams(beam_width=4, max_tokens=11, ignore_eos=True)
    prompts = [prompt_of(10 + k, first=k) for k in range(3)]
    searches = []
    for index, prompt in enumerate(prompts):
        searches.append(begin(core, prompt, params))
        plain = SamplingParams(max_tokens=9, ignore_eos=True)
        core.add(AddRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=plain))
    run(core)
    for prompt, search in zip(prompts, searches, strict=True):
        assert found(search) == expected(prompt, params)
    assert core.stats().num_preemptions > 0 or num_blocks > 12


@pytest.mark.parametrize("num_steps", range(9))
def test_an_abort_leaves_nothing(num_steps: int) -> None:
    core, _ = engine(budget=16)
    search = begin(core, prompt_of(20), BeamSearchParams(beam_width=4, max_tokens=30))
    other = begin(core, prompt_of(9), PARAMS[1])
    for _ in range(num_steps):
        core.step()
    assert core.abort(search.request_id) is not None and search.is_over
    run(core)
    assert found(other) == expected(prompt_of(9), PARAMS[1])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_failing_steps_change_nothing(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "llmc.engine.core")
    num_faults = 0
    for seed in range(25):
        rng = random.Random(seed)
        core, runner = engine(
            num_blocks=rng.choice([14, 40]), budget=rng.choice([5, 64]), depth=depth
        )
        runner.rng, runner.fault_rate = rng, 0.1
        searches = [begin(core, prompt_of(11 + k, first=k), PARAMS[k + 1]) for k in range(3)]
        steps = 0
        while core.has_work:
            runner.fault_rate = 0.1 if steps < 30 else 0.0
            core.step()
            core.check()
            steps += 1
        num_faults += runner.faults
        for k, search in enumerate(searches):
            if search.error is None:
                assert found(search) == expected(prompt_of(11 + k, first=k), PARAMS[k + 1])
            else:  # two faults in a row, of one that ran alone
                assert InjectedFault.__name__ in search.error and search.is_over
        assert core.stats().num_free_blocks == core.stats().num_blocks
    assert num_faults > 25


def test_logits_that_are_not_finite_end_the_search() -> None:
    core, runner = engine()
    runner.nan = True
    search = begin(core, prompt_of(9), BeamSearchParams(beam_width=8, max_tokens=40))
    run(core)
    assert search.error is not None and "not finite" in search.error


def test_more_beams_than_rows_are_refused() -> None:
    core, _ = engine(rows=4)
    with pytest.raises(InvalidRequestError, match="beam_width 5 needs one row per beam") as e:
        begin(core, [1, 2], BeamSearchParams(beam_width=5))
    assert e.value.param == "beam_width" and not core.has_work


@pytest.mark.parametrize(
    "field, value",
    [
        ("beam_width", 0),
        ("beam_width", 65),
        ("beam_width", True),
        ("max_tokens", 0),
        ("length_penalty", math.nan),
        ("length_penalty", 11),
        ("early_stopping", "always"),
        ("temperature", 0.5),
    ],
)
def test_params_outside_their_range(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearchParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
