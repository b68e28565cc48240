"""A runner that records where time is spent: launching, waiting for the device, reading results.

The time of an engine's step without waiting is the host's own work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from llmc.engine.plan import EagerReason, PendingStep, StepPlan, StepResult
from llmc.runner.model_runner import Launched, ModelRunner


@dataclass(slots=True)
class HostTimes:
    """Seconds summed since the last `reset`."""

    launch_s: float = 0.0
    wait_s: float = 0.0
    collect_s: float = 0.0

    def reset(self) -> None:
        self.launch_s = self.wait_s = self.collect_s = 0.0


class TimedRunner:
    """Implements the engine's Runner protocol with the launch and collect of a ModelRunner."""

    def __init__(self, runner: ModelRunner) -> None:
        self.times = HostTimes()
        self._runner = runner

    @property
    def max_in_flight(self) -> int:
        return self._runner.max_in_flight

    def use_idle_time(self, *, has_work: bool = False) -> bool:
        return bool(self._runner.use_idle_time(has_work=has_work))

    def start_profile(self) -> None:
        self._runner.start_profile()

    def stop_profile(self, folder: str) -> str:
        return str(self._runner.stop_profile(folder))

    @property
    def num_runtime_compiles(self) -> int:
        return self._runner.num_runtime_compiles

    @property
    def eager_steps(self) -> Mapping[EagerReason, int]:
        return self._runner.eager_steps

    def submit(self, plan: StepPlan) -> PendingStep:
        start = time.perf_counter()
        launched = self._runner.launch(plan)
        self.times.launch_s += time.perf_counter() - start
        return _Timed(self, launched)

    def finish(self, launched: Launched) -> StepResult:
        start = time.perf_counter()
        if launched.download is not None:
            launched.download.wait()  # an event: waiting for it again costs nothing
        waited = time.perf_counter()
        result = self._runner.collect(launched)
        self.times.wait_s += waited - start
        self.times.collect_s += time.perf_counter() - waited
        return result


class _Timed:
    def __init__(self, runner: TimedRunner, launched: Launched) -> None:
        self._runner = runner
        self._launched = launched

    def result(self) -> StepResult:
        return self._runner.finish(self._launched)
