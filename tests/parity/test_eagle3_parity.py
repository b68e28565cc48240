"""An EAGLE-3 head on real runners: what it computes, and that no answer depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import draft_heads
import pytest
import safetensors.torch
import tiny_engine
import tiny_heads
import tiny_models
import torch
from fake_graphs import FakeGraphs, forbid_host_reads
from op_cases import require_cpu_ops
from speculation_cases import LIMITS, NUM_TOKENS, PROMPTS, SAMPLING

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.engine.plan import RowWork, StepPlan
from llmc.errors import CheckpointError, CompileError, ConfigError
from llmc.pooling import DRAFTED
from llmc.runner.device import HostDevice
from llmc.runner.model_runner import ModelRunner
from llmc.sampling_params import SamplingParams
from llmc.startup import draft_model


def start(target: Path, head: Path, **options: Any) -> tiny_engine.Running:
    drafting = {"method": "eagle3", "model": str(head)}
    return tiny_engine.start(target, speculative_config=drafting, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return tiny_heads.target(folder / "target")


@pytest.fixture(scope="module")
def mistaken(folder: Path, target: Path) -> tiny_engine.Running:
    head = tiny_heads.save(folder / "random", tiny_heads.random_weights())
    return start(target, head, async_scheduling=True)


@pytest.fixture(scope="module")
def knowing(folder: Path) -> tiny_engine.Running:
    target, head = tiny_heads.agreeing(folder)
    return start(target, head, async_scheduling=True)


# Prompts that the head is right behind, whichever of their tokens is the newest known.
TEXTS = [tiny_heads.following(len(prompt), 3 + 10 * i) for i, prompt in enumerate(PROMPTS)]


# ---- what it computes ----


@pytest.mark.parametrize("pieces", [(17,), (5, 9, 3)], ids=["whole", "pieces"])
def test_logits_are_those_of_the_format(
    mistaken: tiny_engine.Running, target: Path, pieces: tuple[int, ...]
) -> None:
    """Of the prompt's places, and then of tokens that the head drew itself."""
    tokens = [(7 * i + 3) % tiny_models.VOCAB for i in range(18)]
    model = tiny_models.load_reference(target)
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    taps = torch.cat([out.hidden_states[i][0] for i in tiny_heads.TAPS], -1)
    weights = tiny_heads.random_weights()
    reference = tiny_heads.Reference(weights, model.get_input_embeddings().weight.detach())
    features = reference.fuse(taps[:-1])
    own = tokens[1:]
    # the target's blocks lie elsewhere than the head's
    theirs, blocks = list(range(9, 15)), list(range(6))
    plain, runner = mistaken.started.runner, draft_heads.drafter(mistaken)
    work = RowWork(row=0, start=0, num_tokens=18, sample=True, new_blocks=theirs)
    plain.execute(
        StepPlan(step=0, new_rows=[draft_heads.row(tokens)], work=[work], released_rows=(0,))
    )
    pairs = [block for pair in zip(blocks, theirs, strict=True) for block in pair]
    start = 0
    for count in pieces:
        is_first, is_last = start == 0, start + count == len(own)
        work = RowWork(
            row=0,
            start=start,
            num_tokens=count,
            sample=is_last,
            new_blocks=pairs if is_first else (),
        )
        plan = StepPlan(
            step=0,
            new_rows=[draft_heads.row(own)] if is_first else (),
            work=[work],
            released_rows=(0,) if is_first else (),
        )
        if not is_last:
            runner.execute(plan)
        start += count
    for _ in range(3):
        logits, left = reference.run(own, features)
        want = reference.widen(logits[-1])
        draft_heads.check_logits(draft_heads.logits_of(mistaken, plan), want)
        [token] = runner.execute(plan).token_ids
        assert token == DRAFTED + int(want.argmax())
        own.append(token - DRAFTED)
        features = torch.cat([features, left[-1:]])
        work = RowWork(row=0, start=len(own) - 1, num_tokens=1, sample=True)
        plan = StepPlan(step=0, work=[work])


# ---- what comes out ----


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_a_head_that_is_mistaken_changes_no_answer(
    mistaken: tiny_engine.Running, limits: dict[str, int], sampling: dict[str, Any]
) -> None:
    stats = draft_heads.answers_are_those_without_it(mistaken, limits, sampling)
    assert stats.num_accepted_tokens < stats.num_draft_tokens / 2


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_a_head_that_knows_the_target_saves_steps(
    knowing: tiny_engine.Running,
    limits: dict[str, int],
    sampling: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    """It is handed the right states: however prompts are cut, and after preemption."""
    stats = draft_heads.answers_are_those_without_it(knowing, limits, sampling, TEXTS)
    if "greedy" in request.node.callspec.id:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert stats.num_accepted_tokens > 0
    if "few-blocks-greedy" in request.node.callspec.id:
        assert stats.num_preemptions > 0


def test_cached_prefixes_keep_their_hidden_states(knowing: tiny_engine.Running) -> None:
    """The target shares the blocks of an earlier request, of which a new head knows nothing."""
    engine = knowing.engine()
    prompt = list(TEXTS[3])
    want = tiny_engine.generate(knowing.engine(), [prompt, prompt], NUM_TOKENS)
    first = tiny_engine.generate(engine, [prompt], 1)
    engine.scheduler.speculation = draft_heads.eager(knowing)
    got = tiny_engine.generate(engine, [prompt, prompt], NUM_TOKENS)
    assert first[0].tokens == want[0].tokens[:1]
    assert [one.tokens for one in got] == [one.tokens for one in want]
    stats = engine.stats()
    assert stats.prefix_cache_hits > 0
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    draft_heads.check_empty(engine)


def test_sequences_of_one_prompt(knowing: tiny_engine.Running) -> None:
    """They share blocks, the last of them until they write to it."""

    def run(engine: EngineCore) -> list[list[int]]:
        for i in range(4):
            sampling = SamplingParams(
                temperature=1.0, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True
            )
            engine.add(
                AddRequest(
                    request_id=str(i),
                    prompt_token_ids=list(PROMPTS[2]),
                    sampling=sampling,
                    fork_of="0" if i else None,
                )
            )
        found = tiny_engine.finish(engine)
        return [found[str(i)].tokens for i in range(4)]

    want = run(knowing.engine())
    engine = knowing.engine(speculation=draft_heads.eager(knowing))
    assert run(engine) == want and len({tuple(tokens) for tokens in want}) > 1
    assert engine.stats().num_accepted_tokens > 0
    draft_heads.check_empty(engine)


def test_aborts_leave_nothing_behind(knowing: tiny_engine.Running) -> None:
    engine = knowing.engine(speculation=draft_heads.eager(knowing), num_blocks=20)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.add(
            AddRequest(request_id=str(index), prompt_token_ids=list(prompt), sampling=sampling)
        )
    for step in range(12):
        engine.step()
        if step % 3 == 2:
            engine.abort(str(step // 3))
    tiny_engine.finish(engine)
    draft_heads.check_empty(engine)


@pytest.mark.exhaustive
def test_a_model_with_windows_keeps_the_states_of_whole_texts(folder: Path) -> None:
    """Blocks behind a window would be freed, and with them what the head is yet to read."""
    path = tiny_models.save_checkpoint(
        "mistral", folder / "windows", num_hidden_layers=tiny_heads.LAYERS
    )
    head = tiny_heads.save(folder / "for windows", tiny_heads.random_weights())
    running = start(path, head)
    assert running.started.engine.scheduler.layout.is_whole
    draft_heads.answers_are_those_without_it(running, {}, {})


# ---- where the embedding comes from, and what goes together ----


def test_the_embedding_is_the_targets_unless_the_head_has_one(
    mistaken: tiny_engine.Running, folder: Path, target: Path
) -> None:
    assert mistaken  # it made the files
    weights = safetensors.torch.load_file(target / "model.safetensors")
    own = tiny_heads.random_weights()
    own["embed_tokens.weight"] = weights["model.embed_tokens.weight"].flip(0)
    path = tiny_heads.save(folder / "own embedding", own)
    with mock.patch.object(draft_model, "load_model", wraps=draft_model.load_model) as load:
        turned = start(target, path)
        assert load.call_args.kwargs["given"] == {}
        plain = start(target, folder / "random")
    [shared] = load.call_args.kwargs["given"].values()
    assert any(shared is one for one in plain.started.model.bound.values())
    draft_heads.answers_are_those_without_it(turned, {}, {})

    def logits(running: tiny_engine.Running, tokens: list[int]) -> torch.Tensor:
        for cache in running.caches:
            cache.zero_()
        blocks = (0, 0)
        work = RowWork(row=0, start=0, num_tokens=3, sample=True, new_blocks=blocks)
        new = draft_heads.row(tokens)
        plan = StepPlan(step=0, new_rows=[new], work=[work], released_rows=(0,))
        return draft_heads.logits_of(running, plan)

    last = tiny_models.VOCAB - 1
    got = logits(turned, [last - 5, last - 6, last - 7])
    torch.testing.assert_close(got, logits(plain, [5, 6, 7]))
    assert not torch.equal(logits(turned, [5, 6, 7]), got)


def test_a_head_for_another_model_is_refused(
    mistaken: tiny_engine.Running, folder: Path, target: Path
) -> None:
    """By the size of the states that it reads, of the embedding that it lacks, or by its layers."""
    assert mistaken  # it captured the target
    weights = tiny_heads.random_weights()
    weights["fc.weight"] = torch.zeros(tiny_heads.HIDDEN, 3 * 48)
    head = tiny_heads.save(folder / "wide", weights)
    with pytest.raises(ConfigError, match="reads hidden states of 48 values, but those of .* 32"):
        start(target, head)
    weights = tiny_heads.random_weights(hidden=48)
    weights["fc.weight"] = torch.zeros(48, 3 * tiny_heads.HIDDEN)
    head = tiny_heads.save(folder / "without", weights, hidden_size=48)
    with pytest.raises(CheckpointError, match=r"\[96, 32\] instead of \[96, 48\]"):
        start(target, head)
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
    head = tiny_heads.save(folder / "deep", tiny_heads.random_weights(), **layers)
    with pytest.raises(CompileError, match="inputs of layers 2, 3, 5 .* the model has 4 layers"):
        start(target, head)


def test_its_steps_run_as_graphs(knowing: tiny_engine.Running) -> None:
    """What it reads of the target and what it leaves lie where they were when it was captured."""
    require_cpu_ops()  # the references read tensors on the host
    backend = FakeGraphs()

    def graphed(plain: ModelRunner) -> ModelRunner:
        return ModelRunner(
            plain.step,
            plain.rows,
            max_tokens=256,
            caches=plain.caches,
            device=HostDevice(backend),
            use_graphs=True,
            buckets=(1, 2, 4, 8),
        )

    want = tiny_engine.generate(knowing.engine(), TEXTS, NUM_TOKENS)
    target, head = graphed(knowing.started.runner), graphed(draft_heads.drafter(knowing))
    engine = knowing.engine(runner=target, speculation=draft_heads.eager(knowing, head))
    for level in (1, 2):  # at the second time there are graphs for steps that are no decodes, too
        for runner in (target, head):
            runner.swap_step(replace(runner.step, level=level))
        with forbid_host_reads():
            while engine.use_idle_time():
                pass
        assert target.step.level == head.step.level == level, "idle time is for both"
        before = sum(head.eager_steps.values())
        got = tiny_engine.generate(engine, TEXTS, NUM_TOKENS)
        assert [one.tokens for one in got] == [one.tokens for one in want]
    assert sum(head.eager_steps.values()) - before < before < backend.num_replays
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def test_nothing_is_kept_where_nobody_drafts(target: Path) -> None:
    running = tiny_engine.start(target)
    program = running.started.model.program
    assert len(program.caches) == tiny_heads.LAYERS
