"""Compiled beside start-up: C++ ops, and better versions of a step that already serves.

On CPU the C++ ops may still be building when the first request comes; at -O1 and above Inductor
takes seconds to minutes. Each step that gets ready replaces the one that runs, between two steps.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from llmc.background_thread import BackgroundThread
from llmc.compiler.lower import StepFunction, lower
from llmc.compiler.program import lowered
from llmc.kernels.cpu.build import Build, BuildError, load, start_build
from llmc.startup.bind import BoundModel

log = logging.getLogger(__name__)


def start_kernels(device: torch.device) -> Build | None:
    """Register the device's kernels. On CPU they may have to be compiled first, which other
    processes do while the model is captured; None where there is nothing to wait for."""
    if device.type == "cpu":
        return start_build()
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module("llmc.kernels.triton")
    return None


def kernels_are_built(build: Build | None) -> bool:
    """Load the C++ ops if they are there; False while they are being built."""
    if build is None:
        return True
    if not build.done:
        return False
    load()  # False where they can't be built: then the references are all there is
    return True


def wait_for_kernels(build: Build) -> None:
    """Wait for the C++ ops: for weights whose references are too slow to be of use meanwhile."""
    with contextlib.suppress(BuildError):  # `load` reports it
        build.wait()


@dataclass(frozen=True, slots=True)
class Stage:
    """Makes a better step, or None, and hot-swaps it for the one that runs."""

    make: Callable[[], StepFunction | None]
    install: Callable[[StepFunction], None]


def compile_in_background(
    models: Sequence[BoundModel], level: int, cache_dir: Path
) -> Upgrade | None:
    """C++ ops first, then Inductor's code at -O1 and above; None where the steps are final."""
    makers: list[Callable[[BoundModel], StepFunction | None]] = []
    if not all(model.kernels_built for model in models):
        makers.append(_with_kernels)
    if level >= 1:
        makers.append(partial(_with_inductor, level=level, cache_dir=cache_dir))
    stages = [
        Stage(partial(make, model), partial(_hot_swap, model))
        for make in makers
        for model in models
    ]
    if not stages:
        return None
    upgrade = Upgrade(stages)
    upgrade.start()
    return upgrade


def _with_kernels(model: BoundModel) -> StepFunction | None:
    return lower(lowered(model.program), model.bound) if load() else None


def _with_inductor(model: BoundModel, *, level: int, cache_dir: Path) -> StepFunction:
    from llmc.compiler.inductor import compile_step  # imports the whole compiler

    graph = lowered(model.program)
    step = compile_step(
        graph, model.bound, model.runner.rows.tables, level=level, cache_dir=cache_dir
    )
    if model.runner.takes_any_shape:  # a batch of one needs no padding in a graph of the plain step
        step = replace(step, small=lower(graph, model.bound))
    return step


def _hot_swap(model: BoundModel, step: StepFunction) -> None:
    model.runner.swap_step(step)


class Upgrade:
    """Runs `stages` in a thread, one after the other.

    A stage that makes None changes nothing. A failure is logged once and kept in `error`, and the
    step that runs stays. `wait()` is for benchmarks and tests.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)
        self.error: Exception | None = None
        self._thread = BackgroundThread(self._run, "llmc-compile")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        for stage in self._stages:
            start = time.perf_counter()
            try:
                step = stage.make()
            except Exception as e:  # the compiler's own code: whatever it raises, serving goes on
                self.error = e
                reason = str(e).strip().splitlines()[0][:300] if str(e).strip() else ""
                log.warning(
                    "background compilation failed (%s: %s); the running step stays in use",
                    type(e).__name__,
                    reason,
                )
                return
            if step is not None:
                stage.install(step)
                log.info(
                    "switched to a faster step (-O%d) after %.1f s",
                    step.level,
                    time.perf_counter() - start,
                )

    def wait(self, timeout: float | None = None) -> bool:
        """True once all stages are done without an error."""
        self._thread.join(timeout)
        return not self._thread.is_alive() and self.error is None
