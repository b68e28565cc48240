"""How calls are timed on a GPU, with a clock and a stream that only pretend: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import bench_package  # noqa: F401 - before bench
import pytest
import torch

import bench.clock as clock

CUDA = torch.device("cuda")
LAUNCH_S = 3e-6  # of the host, for each launch that no graph holds


class Gpu:
    """A device whose time passes by `work` alone; it records and replays calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.recording: list[Callable[[], None]] | None = None
        self.refuses = False
        self.num_replays = 0

    def call(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            if self.recording is not None:
                if self.refuses:
                    raise RuntimeError("operation not permitted when stream is capturing")
                self.recording.append(lambda: self.spend(seconds))
            else:
                self.spend(seconds + LAUNCH_S)

        return run

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    device = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = device.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    class Graph:
        def __init__(self) -> None:
            self.calls: list[Callable[[], None]] = []

        def replay(self) -> None:
            device.num_replays += 1
            for call in self.calls:
                call()

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    warm: list[Stream] = []

    def run_on(stream: Stream) -> AbstractContextManager[None]:
        warm.append(stream)
        return nullcontext()

    @contextmanager
    def record(graph: Graph, stream: Stream) -> Iterator[None]:
        assert stream in warm, "ops allocate what a graph may not, on the stream that runs them"
        device.recording = graph.calls
        try:
            yield
        finally:
            device.recording = None

    fakes = {
        "Event": Event,
        "CUDAGraph": Graph,
        "Stream": Stream,
        "graph": record,
        "stream": run_on,
        "current_stream": Stream,
        "set_stream": lambda stream: None,
        "synchronize": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return device


@pytest.mark.parametrize("seconds", [1e-6, 40e-6, 3e-3, 0.2])
def test_a_graph_leaves_the_launches_out(gpu: Gpu, seconds: float) -> None:
    timing = clock.time_call(gpu.call(seconds), CUDA)
    assert timing.how == "graph"
    assert timing.seconds == pytest.approx(seconds) and timing.spread < 1e-6
    assert gpu.num_replays >= 4


def test_what_no_graph_holds_is_timed_by_its_launches(
    gpu: Gpu, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.refuses = True
    timing = clock.time_call(gpu.call(1e-4), CUDA)
    assert timing.how == "launches"
    assert timing.seconds == pytest.approx(1e-4 + LAUNCH_S)
    assert "not permitted when stream is capturing" in capsys.readouterr().out


def test_the_budget_bounds_the_time_of_a_slow_call(gpu: Gpu) -> None:
    clock.time_call(gpu.call(0.2), CUDA, budget_s=0.4)
    assert gpu.now < 0.2 * 10


def test_calls_on_a_cpu_are_timed_as_they_are() -> None:
    timing = clock.time_call(lambda: None, torch.device("cpu"), budget_s=0.001)
    assert timing.how == "calls" and 0 < timing.seconds < 0.1


def test_graphs_are_replayed_in_turn(gpu: Gpu) -> None:
    """Several at a time, so that what passes before the first one starts counts little."""
    order = []

    def replay(seconds: float) -> Callable[[], None]:
        def run() -> None:
            order.append(seconds)
            gpu.spend(seconds)

        return run

    times = clock.time_in_turn([replay(0.002), replay(0.003)], CUDA, budget_s=0.02)
    assert times == pytest.approx([0.002, 0.003])
    assert order == [0.002] * 4 + ([0.002] * 4 + [0.003] * 4) * 3
    order.clear()
    clock.time_in_turn([replay(0.002)], CUDA, budget_s=0.1)
    assert len(order) == 4 * (1 + 12)


def test_what_a_cpu_computes_is_timed_in_turn_too() -> None:
    order: list[int] = []
    times = clock.time_in_turn(
        [lambda: order.append(1), lambda: order.append(2)], torch.device("cpu"), budget_s=0.0
    )
    assert all(time >= 0 for time in times) and order == [1, *[1, 2] * 3]
