"""The engine on a GPU with everything on: compiled, graphs for every batch size, steps ahead.

Greedy text is that of -O0, whatever bucket a batch falls into; the steady loop makes no call that
waits for the device but the one that reads a result; nothing is compiled while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gpu import DEVICE, DRY_RUN, LEVELS, needs_gpu
from op_cases import require_cpu_ops
from real_model import needs_model

from llmc import LLM, SamplingParams
from llmc.config import INDUCTOR_LEVEL, EngineConfig
from llmc.engine.messages import AddRequest
from llmc.frontend.engine_options import load_tokenizer
from llmc.load_test.explain import Limits, explain_steps
from llmc.runner.graphs import StepGraphs, StepShape
from llmc.runner.model_runner import ModelRunner
from llmc.startup.start import Started, start_engine

pytestmark = [*needs_gpu, needs_model]
MAX_ROWS = 4 if DRY_RUN else 256
NUM_TOKENS = 12
COMPILE_S = 300
QUESTIONS = [
    f"Tell me about {thing}."
    for thing in ("Paris", "the moon", "rain", "the Roman empire", "bread", "whales", "tea", "iron")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """The default model at one level."""

    level: int
    started: Started
    llm: LLM

    def answers(self, count: int) -> list[str]:
        """To the first `count` questions, asked all at once."""
        asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]
        chats = [[{"role": "user", "content": question}] for question in asked]
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = self.llm.chat(chats, params, progress=False)
        assert all(o.error is None for o in outputs)
        return [o.outputs[0].text for o in outputs]


def start(level: int) -> Small:
    if DRY_RUN:
        require_cpu_ops()
    config = EngineConfig(
        device=DEVICE.type,
        opt_level=level,  # type: ignore[arg-type]
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        async_scheduling=level > 0,
        kv_cache_memory=2**26 if DRY_RUN else 2**30,
    )
    started = start_engine(config)
    if started.upgrade is not None:
        assert started.upgrade.wait(COMPILE_S), started.upgrade.error
    while started.runner.use_idle_time(has_work=True):
        pass
    tokenizer = load_tokenizer(config, started.info)
    return Small(level=level, started=started, llm=LLM.from_started(started, config, tokenizer))


@pytest.fixture(scope="module", params=LEVELS)
def fast(request: pytest.FixtureRequest) -> Small:
    return start(request.param)


@pytest.fixture(scope="module")
def plain_answers() -> list[str]:
    """At -O0, one step at a time, no graphs."""
    return start(0).answers(MAX_ROWS)


def test_text_is_that_of_o0_at_every_bucket_dry_run(
    fast: Small, plain_answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = set()
    find = StepGraphs.find

    def recorded(graphs: StepGraphs, step: Any, shape: StepShape, *reason: Any) -> Any:
        graph = find(graphs, step, shape, *reason)
        replayed.update([shape.requests] if graph is not None and shape.is_decode else [])
        return graph

    monkeypatch.setattr(StepGraphs, "find", recorded)
    runner = fast.started.runner
    sizes = list(runner.buckets.sizes)
    assert max(sizes) == MAX_ROWS
    different = []
    for size in sizes:
        got = fast.answers(size)
        wrong = [i for i in range(size) if got[i] != plain_answers[i]]
        different += [f"batch {size}: {got[i]!r}, not {plain_answers[i]!r}" for i in wrong[:2]]
    assert not different, "\n".join(different)
    if not DRY_RUN:
        assert replayed == set(sizes)
        assert runner.step.level == (fast.level if fast.level >= INDUCTOR_LEVEL else 0)
        assert runner.max_in_flight > 1


def test_nothing_is_compiled_while_it_runs_dry_run(fast: Small) -> None:
    """Batches of every kind: odd sizes, prompts of many lengths, mixed with decodes."""
    runner = fast.started.runner
    before = runner.num_runtime_compiles
    for count in (1, 3, min(MAX_ROWS, 7), min(MAX_ROWS, 100), MAX_ROWS):
        fast.answers(count)
    vocab = fast.started.info.vocab_size
    prompts = [[(i * j) % vocab for j in range(n)] for i, n in enumerate((1, 2, 17, 300, 1000))]
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=9, ignore_eos=True)
    outputs = fast.llm.generate(prompts, params, progress=False)
    assert all(len(o.outputs[0].token_ids) == 9 for o in outputs)
    assert runner.num_runtime_compiles == before == 0


@contextmanager
def no_synchronizing_calls() -> Iterator[None]:
    if DRY_RUN:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_steady_loop_makes_no_synchronizing_call_dry_run(fast: Small) -> None:
    core = fast.started.engine
    rows = min(MAX_ROWS, 8)
    params = SamplingParams(temperature=0.7, max_tokens=64, ignore_eos=True, logprobs=2)
    while core.use_idle_time():  # no graph is captured meanwhile
        pass
    for i in range(rows):
        core.add(AddRequest(request_id=f"s{i}", prompt_token_ids=[5, 6, 7 + i], sampling=params))
    for _ in range(6):
        core.step()
    with no_synchronizing_calls():
        gained = [sum(len(u.new_token_ids) for u in core.step()) for _ in range(40)]
    assert gained == [rows] * 40
    while core.has_work:
        core.step()


@pytest.mark.skipif(DRY_RUN, reason="no graphs are captured on the CPU")
def test_graphs_share_the_memory_of_the_largest(fast: Small) -> None:
    """Each of these has 25 MB of logits, and activations for up to 2048 tokens."""
    runner = fast.started.runner
    assert runner.graph_bytes > 0
    before = torch.cuda.memory_reserved()  # of this process; others may be using the GPU too
    for tokens in (320, 640, 896, 1280, 1536, 1792):
        shape = StepShape(tokens, MAX_ROWS + 1, MAX_ROWS + 1)
        assert runner._capture(runner.step, shape)
    assert torch.cuda.memory_reserved() - before < 100 * 2**20
    assert fast.answers(3) == fast.answers(3)


@pytest.mark.skipif(DRY_RUN, reason="the CPU never waits for itself")
def test_the_guard_of_that_test_does_catch() -> None:
    with no_synchronizing_calls(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device=DEVICE).item()


def test_the_runner_waits_for_nothing_when_it_launches_dry_run(fast: Small) -> None:
    runner: ModelRunner = fast.started.runner
    with no_synchronizing_calls():
        runner.dummy_run(min(MAX_ROWS, 8))
    assert runner.num_runtime_compiles == 0


def test_the_ops_of_a_step_are_explained_dry_run(fast: Small) -> None:
    step = fast.started.runner.step
    found = explain_steps(
        fast.started,
        batch_size=2,
        context_len=64,
        input_len=64,
        num_iters=3,
        limits=lambda: Limits(bytes_per_s=1e12, operations_per_s=1e14),
    )
    assert fast.started.runner.step is step
    for explained in found:
        assert 0 < explained.ops_s < 10 * explained.step_s + 0.1
        assert {"linear", "attention", "norm", "sampler"} <= {row.kind for row in explained.rows}
