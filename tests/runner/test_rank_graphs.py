"""The ranks of a tensor-parallel engine replay graphs of the same steps, although each of them
compiles its own faster step in its own time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_engine
import tiny_models
from fake_graphs import FakeGraphs
from op_cases import require_cpu_ops
from rank_threads import RankThreads, rank_threads

from llmc.errors import EngineDeadError
from llmc.runner.capture_pace import CapturePace
from llmc.runner.device import HostDevice
from llmc.runner.model_runner import ModelRunner
from llmc.startup import bind

PROMPTS = tiny_models.prompts((9, 5, 30, 12, 1, 7, 26))
TIGHT: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 14}


@dataclasses.dataclass(frozen=True)
class Ranked:
    running: tiny_engine.Running
    runners: tuple[ModelRunner, ModelRunner]
    backends: tuple[FakeGraphs, FakeGraphs]

    def generate(self) -> list[list[int]]:
        found = tiny_engine.generate(
            self.running.engine(**TIGHT), PROMPTS, 14, temperature=0.9, seed=3
        )
        return [one.tokens for one in found]

    def idle(self) -> None:
        while self.runners[0].use_idle_time():
            pass

    def offer(self, rank: int, level: int) -> None:
        self.runners[rank].swap_step(dataclasses.replace(self.runners[rank].step, level=level))

    @property
    def levels(self) -> tuple[int, int]:
        return self.runners[0].step.level, self.runners[1].step.level

    @property
    def replays(self) -> tuple[int, int]:
        return self.backends[0].num_replays, self.backends[1].num_replays


@pytest.fixture
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranked]:
    require_cpu_ops()
    path = tiny_models.save_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    made: dict[int, tuple[ModelRunner, FakeGraphs]] = {}  # the last of each rank serves

    def graphed(*args: Any, **options: Any) -> ModelRunner:
        backend = FakeGraphs()
        device = HostDevice(backend)
        runner = ModelRunner(*args, **{**options, "use_graphs": True, "device": device})
        made[options["ranks"].rank] = runner, backend
        return runner

    with pytest.MonkeyPatch.context() as patch, rank_threads():
        patch.setattr(bind, "ModelRunner", graphed)
        running = tiny_engine.start(path, tensor_parallel_size=2)
        running.started.runner.dummy_run(1)  # waits until the other rank has made its runner
    (first, ours), (second, theirs) = made[0], made[1]
    yield Ranked(running=running, runners=(first, second), backends=(ours, theirs))
    processes = running.started.rank_processes
    assert isinstance(processes, RankThreads)
    processes.end()


@pytest.mark.parametrize("early", [0, 1])
def test_a_faster_step_runs_once_all_ranks_have_it(ranked: Ranked, early: int) -> None:
    ranked.idle()
    want = ranked.generate()  # shapes of prompts are seen
    ranked.offer(early, level=1)
    ranked.idle()
    assert ranked.levels == (0, 0)
    assert ranked.generate() == want
    assert ranked.replays[0] == ranked.replays[1] > 10, "none has lost its graphs"
    ranked.offer(1 - early, level=1)
    ranked.idle()
    assert ranked.generate() == want
    assert ranked.levels == (1, 1)
    assert ranked.replays[0] == ranked.replays[1]
    assert ranked.backends[0].captured == ranked.backends[1].captured


class Due(CapturePace):
    """Captures before every step."""

    def is_due(self) -> bool:
        return True


def test_ranks_that_are_never_idle_capture_together(ranked: Ranked) -> None:
    want = ranked.generate()
    ranked.runners[0]._pace = Due()
    for _ in range(3):
        assert ranked.generate() == want
    for rank in (1, 0):
        ranked.offer(rank, level=1)
        for _ in range(3):
            assert ranked.generate() == want
    assert ranked.levels == (1, 1)
    assert ranked.replays[0] == ranked.replays[1] > 10
    assert ranked.backends[0].captured == ranked.backends[1].captured


def test_a_step_that_fails_before_its_capture_ends_the_engine(
    ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for its collectives, and would take those of the next step for them."""
    monkeypatch.setattr(ranked.backends[0], "error", RuntimeError("out of memory"))
    with pytest.raises(EngineDeadError, match="ranks are out of sync"):
        ranked.idle()
