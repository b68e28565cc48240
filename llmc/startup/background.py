"""Background compilation: C++ ops, and faster versions of a step that is already serving.

On CPU the C++ ops may still be building when the first request arrives; at -O2 and above, Inductor
takes seconds to minutes. Each version that becomes ready is swapped in between two steps.
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
from llmc.config import INDUCTOR_LEVEL
from llmc.kernels.cpu.build import Build, BuildError, load, start_build
from llmc.startup.bind import BoundModel

log = logging.getLogger(__name__)


def start_kernels(device: torch.device) -> Build | None:
    """Register the device's kernels. On CPU they may have to be compiled first, which happens in
    other processes while the model is captured. None if there is nothing to wait for."""
    if device.type == "cpu":
        return start_build()
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module("llmc.kernels.triton")
    return None


def kernels_are_built(build: Build | None) -> bool:
    """Load the C++ ops if they are built; False while they are being built."""
    if build is None:
        return True
    if not build.done:
        return False
    load()  # False if they can't be built: then there are only the references
    return True


def wait_for_kernels(build: Build) -> None:
    """Wait for the C++ ops, if the references are too slow for these weights in the meantime."""
    with contextlib.suppress(BuildError):  # `load` reports it
        build.wait()


@dataclass(frozen=True, slots=True)
class Stage:
    """Makes a faster step, or None, and swaps it in for the running one."""

    make: Callable[[], StepFunction | None]
    install: Callable[[StepFunction], None]


def compile_in_background(
    models: Sequence[BoundModel], level: int, cache_dir: Path
) -> Upgrade | None:
    """Upgrade to C++ ops first, then to Inductor's code at -O2 and above. None if the steps are
    final already."""
    makers: list[Callable[[BoundModel], StepFunction | None]] = []
    if not all(model.kernels_built for model in models):
        makers.append(_with_kernels)
    if level >= INDUCTOR_LEVEL:
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
    with _current(model.program.device):
        step = compile_step(
            graph, model.bound, model.runner.rows.tables, level=level, cache_dir=cache_dir
        )
    if model.runner.wants_uncompiled:
        step = replace(step, uncompiled=lower(graph, model.bound))
    return step


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU this thread's current one: it is not, on other ranks than the first."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _hot_swap(model: BoundModel, step: StepFunction) -> None:
    model.runner.swap_step(step)


class Upgrade:
    """Runs `stages` in a thread, one after the other.

    A stage that returns None changes nothing. A failure is logged once and kept in `error`, and the
    running step stays in use. `wait()` is for benchmarks and tests.
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
            except Exception as e:  # compiler code: whatever it raises, keep serving
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
        """Wait for all stages. Returns whether they finished without an error."""
        self._thread.join(timeout)
        return not self._thread.is_alive() and self.error is None
