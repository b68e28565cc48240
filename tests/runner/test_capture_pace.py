"""An engine that is never idle captures its graphs too: one at a time, in a small part of the time.

The steps run on the CPU against a backend that records and replays there (support/fake_graphs.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import tiny_models
from fake_graphs import FakeGraphs
from op_cases import require_cpu_ops

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.engine.plan import StepPlan
from llmc.runner import compiles
from llmc.runner.capture_pace import LONG_PAUSE_S, LONG_S, PATIENCE_S, SHARE, CapturePace
from llmc.runner.device import HostDevice
from llmc.runner.graphs import CapturedStep, StepOutputs
from llmc.runner.model_runner import ModelRunner
from llmc.sampling_params import SamplingParams

STEP_S, CAPTURE_S = 0.01, 0.03


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def busy(pace: CapturePace, clock: Clock, seconds: float) -> list[float]:
    """When captures are due in so many seconds of steps; none is made."""
    found = []
    start = clock.now
    while clock.now < start + seconds:
        if pace.is_due():
            found.append(clock.now - start)
        clock.now += STEP_S
    return found


def test_an_idle_moment_makes_captures_between_steps_wait() -> None:
    clock = Clock()
    pace = CapturePace(clock)
    assert busy(pace, clock, 1.5)[0] == pytest.approx(PATIENCE_S, abs=2 * STEP_S)
    pace.on_idle()
    assert busy(pace, clock, 0.9) == []
    assert busy(pace, clock, 0.9)[0] == pytest.approx(0.1, abs=2 * STEP_S)
    clock.now += 3600  # the next request comes an hour later
    assert busy(pace, clock, 0.9) == []


@pytest.mark.parametrize("took", [0.03, 0.2, LONG_S + 0.01, 2.0])
def test_captures_take_a_small_part_of_the_time(took: float) -> None:
    clock = Clock()
    pace = CapturePace(clock)
    busy(pace, clock, 2)
    start = clock.now
    for _ in range(5):
        with pace.timed():
            clock.now += took
        while not pace.is_due():
            clock.now += STEP_S
    elapsed = clock.now - start
    assert 5 * took <= 1.01 * 0.05 * elapsed
    assert (elapsed > 5 * LONG_PAUSE_S) == (took > LONG_S)


class SlowGraphs(FakeGraphs):
    """Captures take time, of which half passes before anything is recorded."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.captured_at: list[float] = []

    def capture(self, run: Callable[[], StepOutputs], inputs: Any) -> CapturedStep:
        self.clock.now += CAPTURE_S
        self.captured_at.append(self.clock.now)
        return super().capture(run, inputs)


class Timed(ModelRunner):
    clock: Clock
    levels: list[int]

    def launch(self, plan: StepPlan) -> Any:
        self.clock.now += STEP_S
        return super().launch(plan)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> tiny_engine.Running:
    require_cpu_ops()  # the references read tensors on the host
    path = tiny_models.save_checkpoint("llama", tmp_path_factory.mktemp("model"))
    return tiny_engine.start(path)


def under_load(running: tiny_engine.Running) -> tuple[Timed, SlowGraphs]:
    """A runner as it is when it begins to serve: with graphs of decodes only."""
    clock = Clock()
    backend = SlowGraphs(clock)
    plain = running.started.runner
    runner = Timed(
        plain.step,
        plain.rows,
        max_tokens=256,
        caches=running.caches,
        device=HostDevice(backend),
        use_graphs=True,
        buckets=(1, 2, 4),
    )
    runner.clock, runner._pace = clock, CapturePace(clock)
    while runner.capture_next() is not None:
        pass
    return runner, backend


_numbers = count()


def serve(engine: EngineCore, steps: int) -> Iterator[None]:
    """Steps of an engine that has four requests of alternating lengths at any time."""
    for number in range(steps):
        while len(engine.scheduler.requests) < 4:
            length = (5, 13)[next(_numbers) % 2]
            engine.add(
                AddRequest(
                    request_id=f"r{next(_numbers)}",
                    prompt_token_ids=[(7 * number + i) % 50 + 1 for i in range(length)],
                    sampling=SamplingParams(max_tokens=6, ignore_eos=True),
                )
            )
        assert all(update.error is None for update in engine.step())
        yield


@contextmanager
def drained(engine: EngineCore) -> Iterator[EngineCore]:
    yield engine
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    while engine.has_work:
        engine.step()


def test_an_engine_that_is_never_idle_gets_all_graphs_and_its_faster_step(
    running: tiny_engine.Running,
) -> None:
    runner, backend = under_load(running)
    start = backend.clock.now
    with drained(running.engine(max_num_seqs=4, runner=runner)) as engine:
        for _ in serve(engine, 90):
            pass
        assert len(backend.captured) == 3, "not in the first second"
        eager = sum(runner.eager_steps.values())
        assert eager > 10
        for _ in serve(engine, 1500):
            pass
        at_level_0 = len(backend.captured)
        assert at_level_0 > 3 and runner.step.level == 0
        runner.swap_step(dataclasses.replace(runner.step, level=1))
        for _ in serve(engine, 1500):
            pass
        assert runner.step.level == 1
        eager = sum(runner.eager_steps.values())
        for _ in serve(engine, 100):
            pass
        assert sum(runner.eager_steps.values()) - eager <= 1, "a shape that came once"
    gaps = [b - a for a, b in zip(backend.captured_at, backend.captured_at[1:], strict=False)]
    assert min(gaps[3:]) >= CAPTURE_S / SHARE, "one at a time"
    assert CAPTURE_S * len(gaps) <= 0.06 * (backend.clock.now - start)


def test_a_graph_of_the_faster_step_is_used_before_it_has_them_all(
    running: tiny_engine.Running,
) -> None:
    runner, backend = under_load(running)
    levels: list[int] = []

    def call(**inputs: Any) -> Any:
        levels.append(1)
        return plain.call(**inputs)

    plain = runner.step
    runner.swap_step(dataclasses.replace(plain, level=1, call=call))
    with drained(running.engine(max_num_seqs=4, runner=runner)) as engine:
        for _ in serve(engine, 200):
            if len(backend.captured) > 4:
                break
        assert runner.step.level == 0
        levels.clear()
        replays = backend.num_replays
        for _ in serve(engine, 12):
            pass
        assert 0 < len(levels) <= backend.num_replays - replays


def test_a_compilation_that_a_capture_waits_for_is_counted(
    running: tiny_engine.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, backend = under_load(running)
    capture = backend.capture

    def compiling(*args: Any) -> CapturedStep:
        compiles._count("a kernel")
        return capture(*args)

    monkeypatch.setattr(backend, "capture", compiling)
    with drained(running.engine(max_num_seqs=4, runner=runner)) as engine:
        for _ in serve(engine, 300):
            pass
    assert runner.num_runtime_compiles == len(backend.captured) - 3 > 0


def test_nothing_is_captured_between_steps_if_there_are_idle_moments(
    running: tiny_engine.Running,
) -> None:
    runner, backend = under_load(running)
    with drained(running.engine(max_num_seqs=4, runner=runner)) as engine:
        for number, _ in enumerate(serve(engine, 600)):
            if number % 50 == 0:
                runner._pace.on_idle()
    assert len(backend.captured) == 3


def test_the_answers_are_the_same(running: tiny_engine.Running) -> None:
    prompts = tiny_models.prompts((5, 3, 9, 1, 6)) * 3
    want = tiny_engine.generate(running.engine(max_num_seqs=4), prompts, 12)
    runner, backend = under_load(running)
    engine = running.engine(max_num_seqs=4, runner=runner)
    for level in (1, 2):
        runner.swap_step(dataclasses.replace(runner.step, level=level))
        backend.clock.now += 0.9
        for _ in range(8):
            got = tiny_engine.generate(engine, prompts, 12)
            assert [g.tokens for g in got] == [w.tokens for w in want]
    assert runner.step.level == 2 and len(backend.captured) > 10


def test_the_real_clock_is_used(tmp_path: Path) -> None:
    pace = CapturePace()
    assert not pace.is_due()
