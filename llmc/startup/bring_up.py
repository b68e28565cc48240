"""Programs + weights -> ModelRunners over caches of a measured size, and their better versions.

Last stage of start-up: a probe step tells what activations take, the pools get what memory is
left, the steps are bound; C++ ops and Inductor's code are exchanged in when they are ready.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch

from llmc.compiler.lower import StepFunction, lower
from llmc.compiler.program import lowered
from llmc.config import EngineConfig
from llmc.kernels.cpu.build import Build, load, start_build
from llmc.runner.model_runner import ModelRunner
from llmc.startup.background import Stage, Upgrade
from llmc.startup.profile import BoundRunner, ProfiledModel
from llmc.startup.sizing import PoolSize, free_bytes, size_pool


def start_kernels(device: torch.device) -> Build | None:
    """Make the device's kernels known. On CPU a C++ compiler may have to build them first: it
    works in processes of its own while the model is captured, and nobody waits for it."""
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
    load()  # False where they can't be built: the references are all there is
    return True


def size_pools(
    config: EngineConfig, device: torch.device, models: Sequence[ProfiledModel]
) -> PoolSize:
    """The blocks that fit, of each model's cache: all have as many, of their own size. `config`
    and the limits of the context are those of the first."""
    beside = sum(model.bytes_beside for model in models)
    return size_pool(
        config,
        models[0].layout,
        bytes_per_token=sum(model.bytes_per_token for model in models),
        model_len=models[0].model_len,
        available=free_bytes(device, config) - beside,
    )


def start_upgrade(models: Sequence[BoundRunner], level: int, cache_dir: Path) -> Upgrade | None:
    """Exchange the steps for better ones as they get ready: C++ ops, then Inductor's code."""

    def with_kernels(model: BoundRunner) -> StepFunction | None:
        return lower(lowered(model.program), model.bound) if load() else None

    def compiled(model: BoundRunner) -> StepFunction | None:
        from llmc.compiler.inductor import compile_step  # imports the whole compiler

        step = compile_step(
            lowered(model.program),
            model.bound,
            model.runner.rows.tables,
            level=level,
            cache_dir=cache_dir,
        )
        if model.runner.has_graphs:  # a batch of one needs no padding in a graph of the plain step
            step = dataclasses.replace(step, small=lower(lowered(model.program), model.bound))
        return step

    makers = [compiled] if level >= 1 else []
    if not all(model.kernels_built for model in models):
        makers = [with_kernels, *makers]
    stages = [
        Stage(functools.partial(make, model), functools.partial(_exchange, model.runner))
        for make in makers
        for model in models
    ]
    if not stages:
        return None
    upgrade = Upgrade(stages)
    upgrade.start()
    return upgrade


def _exchange(runner: ModelRunner, step: StepFunction) -> None:
    runner.swap_step(step)
