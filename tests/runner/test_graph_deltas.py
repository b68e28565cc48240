"""A step's delta is applied inside its graph: the same tokens as without graphs, whatever comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_engine
import tiny_models
import torch
from fake_graphs import FakeGraphs
from op_cases import require_cpu_ops
from rank_threads import RankThreads, rank_threads
from tiny_configs import save_random, tiny_config

from llmc.compiler.lower import StepFunction
from llmc.engine.core import EngineCore
from llmc.engine.kv.swap import SwapConfig
from llmc.engine.plan import StepPlan
from llmc.runner import device as device_module
from llmc.runner import step_buffers
from llmc.runner.delta import Delta
from llmc.runner.device import CudaDevice, HostDevice
from llmc.runner.model_runner import ModelRunner
from llmc.startup import bind

PROMPTS = tiny_models.prompts((9, 5, 30, 12, 1, 7, 26))
NUM_TOKENS = 14
# admissions and finishes (more requests than rows), chunks, and too few blocks for all
TIGHT: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 14}


class CountingRunner(ModelRunner):
    """Counts the steps whose inputs are prepared outside of a graph, and copies of states."""

    num_prepared = num_loads = num_saves = 0

    def _prepare(self, *args: Any) -> Any:
        self.num_prepared += 1
        return super()._prepare(*args)

    def _copy(self, delta: Delta, sent: torch.Tensor) -> None:
        self.num_loads += delta.num_loads
        self.num_saves += delta.num_saves
        super()._copy(delta, sent)


def graphed(running: tiny_engine.Running, **options: Any) -> CountingRunner:
    plain = running.started.runner
    return CountingRunner(
        plain.step,
        plain.rows,
        max_tokens=256,
        caches=running.caches,
        states=running.states,
        swap_space=plain.swap_space,
        device=HostDevice(FakeGraphs()),
        use_graphs=True,
        buckets=(1, 2, 4),
        **options,
    )


def generate(engine: EngineCore) -> list[tiny_engine.Generated]:
    return tiny_engine.generate(engine, PROMPTS, NUM_TOKENS, temperature=0.9, seed=3)


def same(got: Sequence[tiny_engine.Generated], want: Sequence[tiny_engine.Generated]) -> None:
    assert [one.tokens for one in got] == [one.tokens for one in want]
    for one, other in zip(got, want, strict=True):  # padding changes the order of sums
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def check(running: tiny_engine.Running, runner: CountingRunner, **options: Any) -> EngineCore:
    """Compare two rounds: at the second, steps with prompts have graphs too."""
    want = generate(running.engine(**TIGHT, **options))
    for _ in range(2):
        while runner.use_idle_time():
            pass
        engine = running.engine(**TIGHT, **options, runner=runner)
        before = runner.num_prepared, sum(runner.eager_steps.values())
        same(generate(engine), want)
    eager = sum(runner.eager_steps.values()) - before[1]
    assert runner.num_prepared - before[0] == eager, "a replay launches nothing before it"
    backend = runner._device.graphs
    assert isinstance(backend, FakeGraphs) and backend.num_replays > 4 * eager
    return engine


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> tiny_engine.Running:
    require_cpu_ops()
    path = tiny_models.save_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    return tiny_engine.start(path, swap_space=2**20)


@pytest.mark.parametrize("max_in_flight", [1, 3])
@pytest.mark.parametrize("words", [1 << 20, 100], ids=["every delta fits", "most prompts do not"])
def test_preempted_and_chunked_requests(
    running: tiny_engine.Running, words: int, max_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_buffers, "_DELTA_WORDS", words)
    kept: list[int] = []
    keep = step_buffers.StepBuffers.keep

    def counted(buffers: step_buffers.StepBuffers, delta: Any, sent: torch.Tensor) -> None:
        assert buffers.delta is not None
        kept.append(sent.numel() > buffers.delta.numel())
        keep(buffers, delta, sent)

    monkeypatch.setattr(step_buffers.StepBuffers, "keep", counted)
    engine = check(running, graphed(running, max_in_flight=max_in_flight))
    assert engine.stats().num_preemptions > 0
    assert any(kept) == (words == 100) and not all(kept)


def test_swapped_requests(running: tiny_engine.Running) -> None:
    runner = graphed(running)
    swap = running.started.engine.scheduler.rows.swap
    assert swap is not None and runner.swap_space is not None
    cheap = dataclasses.replace(swap.config.cost, prefill_seconds_per_token=1e9)
    config = SwapConfig(runner.swap_space.num_slots, cheap)
    engine = check(running, runner, swap_config=config, enable_prefix_caching=False)
    assert engine.stats().num_swaps > 0


def test_states_that_are_loaded_and_saved_around_the_graph(tmp_path: Path) -> None:
    require_cpu_ops()
    recurrent = tiny_engine.start(save_random(tiny_config("bamba"), tmp_path))
    runner = graphed(recurrent)
    check(recurrent, runner)
    long = tiny_models.prompts((36, 41))  # so long that a state is kept where they end
    plain, engine = recurrent.engine(), recurrent.engine(runner=runner)
    for _ in range(2):
        same(*(tiny_engine.generate(one, long, NUM_TOKENS) for one in (engine, plain)))
    assert runner.num_loads > 0 and runner.num_saves > 0


class Shift:
    """Images that move every position, as those of models with several axes do."""

    moves_positions = True

    def follow(self, plan: StepPlan) -> None: ...

    def are_read(self, plan: StepPlan) -> bool:
        return False

    def shift(self, plan: StepPlan, positions: torch.Tensor) -> None:
        positions += torch.arange(len(positions)) % 3


def test_positions_that_the_host_moves_are_prepared_before_the_graph(
    running: tiny_engine.Running,
) -> None:
    plain = running.started.runner
    moved: Any = Shift()
    eager = ModelRunner(plain.step, plain.rows, max_tokens=256, images=moved)
    runner = graphed(running, images=moved)
    while runner.use_idle_time():
        pass
    want, got = (generate(running.engine(max_num_seqs=4, runner=one)) for one in (eager, runner))
    same(got, want)
    assert [one.tokens for one in got] != [one.tokens for one in generate(running.engine())]
    backend = runner._device.graphs
    assert isinstance(backend, FakeGraphs)
    assert 10 < backend.num_replays < runner.num_prepared


class Reading(Shift):
    """Images that every step reads."""

    def __init__(self, step: StepFunction) -> None:
        self.step = step

    def are_read(self, plan: StepPlan) -> bool:
        return True

    def inputs(self, *given: Any) -> dict[str, torch.Tensor]:
        return {}


def test_steps_that_read_images_are_counted(running: tiny_engine.Running) -> None:
    reading: Any = Reading(running.started.runner.step)
    runner = graphed(running, images=reading)
    engine = running.engine(max_num_seqs=4, runner=runner)
    same(generate(engine), generate(running.engine(max_num_seqs=4)))
    stats = engine.stats()
    assert stats.num_eager_images == stats.num_steps == sum(runner.eager_steps.values()) > 10


class Events:
    """torch.cuda.Event without a GPU; what was waited for, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited: list[int] = []
        self.made = 0
        outer = self

        class Event:
            def record(self) -> None:
                outer.made += 1
                self.number = outer.made

            def synchronize(self) -> None:
                outer.waited.append(self.number)

        monkeypatch.setattr(torch.cuda, "Event", Event)


def test_pinned_words_stay_until_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two steps in flight, the fourth upload waits for the copy of the first."""
    events = Events(monkeypatch)
    empty = torch.empty
    monkeypatch.setattr(
        device_module.torch, "empty", lambda *size, pin_memory=False, **o: empty(*size, **o)
    )
    device = CudaDevice(torch.device("cpu"), max_in_flight=2)
    home = torch.zeros(8, dtype=torch.int32)
    for number in range(5):
        words = np.full(6, number, np.int32)
        sent = device.upload(words, home)
        assert sent.data_ptr() == home.data_ptr() and sent.tolist() == [number] * 6
    assert events.waited == [1, 2] and home[6:].tolist() == [0, 0]
    assert len({buffer.data_ptr() for buffer in device._ring}) == 3
    large = device.upload(np.arange(9, dtype=np.int32), home)
    assert large.tolist() == list(range(9)) and home[:6].tolist() == [4] * 6
    assert large.data_ptr() != home.data_ptr()


def test_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks replay graphs of their own for the same deltas."""
    require_cpu_ops()
    path = tiny_models.save_checkpoint("llama", tmp_path)
    backends: list[FakeGraphs] = []

    def opened(*args: Any, **options: Any) -> HostDevice:
        backends.append(FakeGraphs())
        return HostDevice(backends[-1])

    one = tiny_engine.start(path)
    want = generate(one.engine(**TIGHT))

    def with_graphs(*args: Any, **options: Any) -> ModelRunner:
        return ModelRunner(*args, **{**options, "use_graphs": True})

    monkeypatch.setattr(bind, "open_device", opened)
    monkeypatch.setattr(bind, "ModelRunner", with_graphs)
    with rank_threads():
        many = tiny_engine.start(path, tensor_parallel_size=2)
    for _ in range(2):
        while many.started.runner.use_idle_time():
            pass
        same(generate(many.engine(**TIGHT)), want)
    processes = many.started.rank_processes
    assert isinstance(processes, RankThreads)
    processes.stop()
    replays = [backend.num_replays for backend in backends if backend.num_replays]
    assert len(replays) == 2 and replays[0] == replays[1] > 10
