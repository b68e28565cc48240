"""A running model of a given shape with random weights: starts, times and releases it."""

from __future__ import annotations

import contextlib
import gc
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.record import failure
from bench.gpu.settings import CONFIGS, Model, Settings
from bench.gpu.shapes import Config, read_config
from bench.gpu.timed_runner import TimedRunner
from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.model_info import ModelInfo, Phase, PhaseBegins
from llmc.runner.model_runner import ModelRunner
from llmc.startup.start import start_engine

_COMPILE_S = 100.0  # then the step that already runs is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A started engine's runner; `core()` creates a new scheduler on it."""

    settings: Settings
    config: Config
    options: EngineConfig
    runner: ModelRunner
    info: ModelInfo
    startup: dict[str, Any]

    def core(self, runner: TimedRunner | ModelRunner, async_scheduling: bool = True) -> EngineCore:
        return EngineCore(
            runner,
            EngineLimits(
                num_blocks=self.info.num_blocks,
                block_size=self.info.block_size,
                max_num_seqs=self.options.max_num_seqs,
                max_num_batched_tokens=self.options.max_num_batched_tokens,
                max_model_len=self.info.max_model_len,
                vocab_size=self.info.vocab_size,
            ),
            EngineFeatures(enable_prefix_caching=False, async_scheduling=async_scheduling),
        )

    def prompts(self, count: int, length: int) -> list[list[int]]:
        gen = random.Random(count * 1000 + length)
        return [[gen.randrange(self.info.vocab_size) for _ in range(length)] for _ in range(count)]


def serve(core: EngineCore, num_tokens: int) -> None:
    """Step until all requests are done; checks that they got `num_tokens` in total."""
    produced = 0
    while core.has_work:
        for update in core.step():
            if update.error is not None:
                raise RuntimeError(update.error)
            produced += len(update.new_token_ids)
    if produced != num_tokens:
        raise RuntimeError(f"got {produced} tokens instead of {num_tokens}")


@contextmanager
def model_folder(config: str) -> Iterator[Path]:
    """A model directory with only the config, a file of bench/configs."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(CONFIGS / config, Path(folder) / "config.json")
        yield Path(folder)


@contextmanager
def running(settings: Settings, model: Model, **options: Any) -> Iterator[Subject]:
    """A started, compiled subject with captured graphs; its memory is freed afterwards."""
    with model_folder(model.config) as folder:
        subject = start(settings, model, folder, **options)
    try:
        yield subject
    finally:
        del subject
        release()


def start(settings: Settings, model: Model, folder: Path, **options: Any) -> Subject:
    """At the default level or, if that fails, at the one below; at `opt_level`, if it is given."""
    failed: dict[str, str] = {}
    for level in range(settings.default_level, 0, -1) if "opt_level" not in options else ():
        try:
            return _start(settings, model, folder, failed, opt_level=level, **options)
        except Exception as error:  # whatever it is, a slower figure is better than none
            traceback.print_exc()
            failed[f"-O{level}"] = failure(error)["error"]
        release()
    return _start(settings, model, folder, failed, **{"opt_level": 0, **options})


def _start(
    settings: Settings, model: Model, folder: Path, failed: Mapping[str, str], **options: Any
) -> Subject:
    config = EngineConfig(
        **{
            "model": str(folder),
            "load_format": "dummy",
            "device": settings.device,
            "dtype": settings.dtype,
            "max_num_seqs": settings.max_rows,
            "max_num_batched_tokens": settings.max_tokens,
            "kv_cache_memory": model.cache_bytes,
            "enable_prefix_caching": False,
            **options,
        }
    )
    begun = time.perf_counter()
    started = start_engine(config, _print_phase)
    usable = time.perf_counter() - begun
    missing = None
    if started.upgrade is not None and not started.upgrade.wait(_COMPILE_S):
        missing = f"the step was not compiled: {started.upgrade.error or 'too slow'}"
        print(f"  {missing}", flush=True)
    compiled = time.perf_counter() - begun - usable
    graphs = swap_and_capture(started.runner)
    fill_caches(started.runner)
    startup = {
        "phases": {p.name: {"seconds": p.seconds, "detail": p.detail} for p in started.phases},
        "usable_seconds": usable,
        "inductor_seconds": compiled,
        **graphs,
        "level": started.runner.step.level,  # of the step that is measured
        "not_compiled": missing,
        "opt_level": config.opt_level,
        "failed_levels": failed,  # above that one
        "num_blocks": started.info.num_blocks,
        "passes": list(started.info.pass_reports),
    }
    return Subject(
        settings=settings,
        config=read_config(model.config),
        options=config,
        runner=started.runner,
        info=started.info,
        startup=startup,
    )


def swap_and_capture(runner: ModelRunner) -> dict[str, Any]:
    """What an engine does when it is idle: swap in the compiled step, and capture its graphs."""
    took = []
    is_done = False
    while not is_done:
        begun = time.perf_counter()
        is_done = not runner.use_idle_time(has_work=True)
        took.append(time.perf_counter() - begun)
    return {
        "capture_seconds": sum(took),
        "longest_capture_seconds": max(took),
        "num_captures": len(took) - 1,
        "graph_bytes": runner.graph_bytes,
    }


def fill_caches(runner: ModelRunner) -> None:
    """Fill the caches with random keys and values, so that contexts need not be computed."""
    with torch.inference_mode():
        for cache in runner.caches:
            cache.normal_()


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        with contextlib.suppress(RuntimeError):  # a graph's pool may still be in use
            torch.cuda.empty_cache()


def _print_phase(phase: PhaseBegins | Phase) -> None:
    if isinstance(phase, Phase):
        print(f"  {phase.name}: {phase.seconds:.1f} s {phase.detail}")
