"""`bench.tune --steps` under Triton's interpreter: which options decode steps find and refuse.

Times are made up from the options in use; the engine, its kernels and their results are real.
Run by test_ops_triton.py, for the same reason as interpreted_ops.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_package  # noqa: F401 - makes `bench` importable
import fast_interpreter  # noqa: F401 - the tests take a fraction of the time
import pytest
import torch
from fake_graphs import FakeGraphs
from torch import Tensor
from triton.runtime.errors import OutOfResources

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from bench import option_search, step_options
from bench.gpu.direct import DirectBatch
from bench.gpu.settings import tiny
from bench.gpu.subject import Subject, running
from bench.option_search import Found
from bench.step_options import Step, compared, tune_steps
from bench.tuned_table import Asked, using
from llmc.kernels import tuned
from llmc.kernels.triton import launch
from llmc.kernels.triton.linear_configs import few_rows_tiles
from llmc.kernels.tuned import Key, read_table
from llmc.runner.device import HostDevice
from llmc.runner.graphs import CapturedStep, StepOutputs, StepShape
from llmc.startup import bind

Table = Mapping[Key, Any]
DOWN = (64, 128, 4, False)  # channels, depth, bytes per weight, gated: the linear after activations
CONTEXT = 6


class TableGraphs(FakeGraphs):
    """Replays use the options of their capture, as the kernels of a CUDA graph do."""

    def __init__(self) -> None:
        super().__init__()
        self.replayed: Table = {}  # with these

    def capture(self, run: Callable[[], StepOutputs], inputs: Mapping[str, Tensor]) -> CapturedStep:
        table = tuned.load_table()

        def again() -> StepOutputs:
            self.replayed = table
            with using(table):
                return run()

        return Replayed(super().capture(again, inputs))


class Replayed:
    """Works outside of inference mode too, as a CUDA graph does."""

    def __init__(self, step: CapturedStep, times: float = 1.0) -> None:
        self._step, self._times = step, times

    def replay(self) -> StepOutputs:
        with torch.inference_mode():
            tokens, logits = self._step.replay()
        return tokens, logits * self._times if self._times != 1 else logits


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Subject, TableGraphs]]:
    backends: list[TableGraphs] = []

    def opened(device: torch.device, **options: Any) -> HostDevice:
        backends.append(TableGraphs())
        return HostDevice(backends[-1])

    settings = replace(tiny(), max_rows=2, max_tokens=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LLMC_TUNED", raising=False)
        patch.setattr(bind, "open_device", opened)
        tuned.load_table.cache_clear()
        with running(settings, settings.smallest) as subject:
            yield subject, backends[-1]


@pytest.fixture(autouse=True)
def compilable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_uncompilable", {})


@pytest.fixture
def step(started: tuple[Subject, TableGraphs]) -> Step:
    return Step(started[0], "a model", 2, CONTEXT)


def down(step: Step) -> Key:
    [key] = [key for key in step.asked() if key[:2] == ("few_rows_tiles", DOWN)]
    return key


def tried(patch: pytest.MonkeyPatch, backend: TableGraphs, key: Key, **costs: float) -> None:
    """The neighbours of `key` differ in one field each, and take these seconds; all else takes 1.
    Fields are named with their values: block_n_32."""
    options = {}
    for name, seconds in costs.items():
        field, _, value = name.rpartition("_")
        options[replace(key[2], **{field: int(value)})] = seconds

    def in_turn(replays: Sequence[Any], device: torch.device, *, budget_s: float) -> list[float]:
        found = []
        for replay in replays:
            replay()
            found.append(options.get(backend.replayed.get(key), 1.0))
        return found

    patch.setattr(option_search, "neighbours", lambda function, at, chosen: list(options))
    patch.setattr(step_options, "time_in_turn", in_turn)


def tuned_down(step: Step, path: Path) -> list[Found]:
    return tune_steps([step], path, 600, only="few_rows_tiles")


def only_down(patch: pytest.MonkeyPatch, key: Key) -> None:
    patch.setattr(Step, "asked", lambda step: [key])


def test_steps_ask_for_what_the_engine_asks_for_in_a_capture(
    started: tuple[Subject, TableGraphs], step: Step
) -> None:
    asked = Asked()
    with using(asked):
        started[0].runner.capture_again(StepShape.decode(2))
    keys = step.asked()
    assert keys == list(asked) and {key[0] for key in keys} == {
        "few_rows_tiles",
        "attention_config",
    }
    one = Step(started[0], "a model", 1, CONTEXT).asked()
    shared = set(one) & set(keys)
    assert {key[0] for key in shared} == {"attention_config"}


def test_a_faster_option_is_found_and_written_and_the_engine_stays_as_it_was(
    started: tuple[Subject, TableGraphs],
    step: Step,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    subject, backend = started
    key = down(step)
    only_down(monkeypatch, key)
    tried(monkeypatch, backend, key, block_n_32=0.9, waves_2=0.99)
    num_captured = len(backend.captured)
    [found] = tuned_down(step, tmp_path / "tuned.json")
    assert found.options == replace(key[2], block_n=32)
    assert found.num_tried == 2 and found.failed == {}
    assert found.before == {"decode step of 2 x 6 tokens, a model": 1.0}
    assert found.after == {"decode step of 2 x 6 tokens, a model": 0.9}
    assert read_table(tmp_path / "tuned.json") == {key: found.options}
    assert backend.captured[num_captured:] == [StepShape.decode(2)] * 7
    batch = DirectBatch(subject, 2, CONTEXT, 2)
    for plan in (batch.next(), batch.next(), batch.leave()):
        subject.runner.execute(plan)
    assert backend.replayed == {}, "the engine's own graph has the code's options"
    tried(monkeypatch, backend, key, block_n_32=0.98)
    assert tuned_down(step, tmp_path / "tuned.json") == [], "too little for a line"
    assert json.loads((tmp_path / "tuned.json").read_text())["lines"] == []


def test_options_of_other_logits_and_those_that_fail_are_left_out(
    started: tuple[Subject, TableGraphs],
    step: Step,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tiles of one row leave the second one out."""
    _, backend = started
    key = down(step)
    only_down(monkeypatch, key)
    queue, capture = launch.Launch._queue, TableGraphs.capture

    def refused(self: launch.Launch) -> None:
        if self.constants.get("BLOCK_N") == 64:
            raise OutOfResources(300_000, 232_448, "shared memory")
        queue(self)

    def limited(self: TableGraphs, *args: Any) -> CapturedStep:
        if tuned.load_table().get(key, key[2]).waves == 8:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(self, *args)

    monkeypatch.setattr(launch.Launch, "_queue", refused)
    monkeypatch.setattr(TableGraphs, "capture", limited)
    costs = {"block_m_1": 0.5, "block_n_64": 0.6, "waves_8": 0.7, "num_warps_8": 0.8}
    tried(monkeypatch, backend, key, **costs)
    [found] = tuned_down(step, tmp_path / "tuned.json")
    assert found.options == replace(key[2], num_warps=8)
    first, second, third = found.failed.items()
    assert "block_m=1," in first[0] and "another result than the right one" in first[1]
    assert "block_n=64" in second[0] and "OutOfResources" in second[1]
    assert "waves=8" in third[0] and "stream is capturing" in third[1]
    assert "4 tried, 3 failed" in capsys.readouterr().out


def test_replays_of_other_logits_are_refused(
    started: tuple[Subject, TableGraphs], step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the same kernels are right without a graph."""
    runner = started[0].runner
    again = runner.capture_again

    monkeypatch.setattr(runner, "capture_again", lambda shape: Replayed(again(shape), 1.1))
    with pytest.raises(RuntimeError, match="another result than the right one"):
        step.seconds([{}], 0.01)


def test_steps_of_a_runner_without_graphs_are_timed_with_their_options(
    started: tuple[Subject, TableGraphs], step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a rehearsal on a CPU."""
    used = []
    monkeypatch.setattr(type(started[0].runner), "has_graphs", False)
    logits = started[0].runner.logits

    def spied(plan: Any) -> Tensor:
        used.append(tuned.load_table())
        return logits(plan)

    monkeypatch.setattr(started[0].runner, "logits", spied)
    key = down(step)
    table = {key: replace(key[2], waves=2)}
    before, after = step.seconds([{}, table], 0.01)
    assert before > 0 and after > 0
    assert used[:2] == [{}, table] and used[-2:] == [{}, table]


class Priced:
    """A step whose time is 1, times those of the options in the table."""

    def __init__(self, name: str, costs: Mapping[Key, float]) -> None:
        self.name, self._costs = name, costs

    def seconds(self, tables: Sequence[Table], budget_s: float) -> list[float]:
        times = []
        for table in tables:
            seconds = 1.0
            for key in table:
                seconds *= self._costs.get(key, 1.0)
            times.append(seconds)
        return times


def test_what_does_not_help_whole_steps_is_left_out_and_the_rest_compared_again() -> None:
    chosen = few_rows_tiles.rule(1, *DOWN)
    own, shared = (("few_rows_tiles", (n, *DOWN[1:]), chosen) for n in (8, 16))
    one = Priced("one", {own: 0.95, shared: 0.99})
    many = Priced("many", {shared: 1.01})
    asked: dict[Key, list[Any]] = {own: [one], shared: [one, many]}
    searched = [
        Found(
            key=key,
            options=replace(chosen, waves=2),
            before={"": 1.0},
            after={"": 0.99},
            gain=step_options.Steps.gain,
            num_tried=1,
            failed={},
        )
        for key in asked
    ]
    [found] = compared(asked, searched)
    assert found.key == own and found.line is not None
    assert found.before == {"one": 1.0} and found.after == {"one": 0.95}
    assert compared(asked, [replace(searched[0], after={"": 0.998})]) == []
