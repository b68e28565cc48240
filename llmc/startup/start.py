"""EngineConfig -> a running EngineCore: all of start-up, in order, with every phase timed.

    check paths -> resolve -> compile (build, capture, rewrite, or the cache) -> load weights
    -> profile -> size -> bind -> engine; faster steps are compiled in the background

torch is imported after the paths are checked. stages.py has what comes then.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.config import EngineConfig
from llmc.garbage import without_collections
from llmc.model_info import OnPhase
from llmc.startup.model_files import fetch, locate
from llmc.startup.phase_clock import PhaseClock
from llmc.startup.resolve import check_paths
from llmc.weights.weight_files import check_has_weights

if TYPE_CHECKING:
    from llmc.engine.core import EngineCore
    from llmc.model_info import ModelInfo, Phase
    from llmc.runner.model_runner import ModelRunner
    from llmc.startup.background import Upgrade
    from llmc.startup.bind import BoundModel
    from llmc.startup.tensor_parallel import RankProcesses


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A running engine and how it was started."""

    engine: EngineCore
    runner: ModelRunner
    model: BoundModel
    info: ModelInfo
    phases: list[Phase]
    upgrade: Upgrade | None = None  # steps being compiled, which will replace the current one
    rank_processes: RankProcesses | None = None  # of a tensor-parallel engine; they end with it

    def end_ranks(self) -> None:
        """End the other ranks' processes. May be called more than once."""
        if self.rank_processes is not None:
            self.rank_processes.end()


def start_engine(config: EngineConfig, on_phase: OnPhase | None = None) -> Started:
    """Start an engine. Raises ConfigError, CheckpointError or CompileError, or EngineDeadError if
    another rank of a tensor-parallel engine does not start."""
    clock = PhaseClock(on_phase)
    with without_collections():  # start-up creates many objects and hardly any cycles
        return _start_ranks(config, clock)


def _start_ranks(config: EngineConfig, clock: PhaseClock) -> Started:
    if config.tensor_parallel_size == 1:
        return _start(config, clock, None)
    from llmc.startup.tensor_parallel import RankProcesses, check_tensor_parallel

    check_tensor_parallel(config)
    check_paths(config)
    if config.distributed_executor_backend == "ray":
        from llmc.startup.ray_ranks import RayRanks

        processes: RankProcesses = RayRanks(config)
    else:
        processes = RankProcesses(config.tensor_parallel_size)
    try:
        return _start(config, clock, processes)
    except BaseException:
        processes.end()
        raise


def release_freed_memory() -> None:
    """Return the memory of unreferenced engines to the system."""
    import torch

    from llmc.kernels.cpu.pages import release_memory

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    release_memory(())


def _start(config: EngineConfig, clock: PhaseClock, processes: RankProcesses | None) -> Started:
    check_paths(config)
    location = locate(config)
    if location is None:
        with clock.phase("download"):
            location = fetch(config)
    if not location.is_gguf and config.load_format != "dummy":
        check_has_weights(location.path)
    with clock.phase("import torch"):
        from llmc.startup import stages

    resolved = stages.resolve_models(config, location, clock)
    stages.limit_to_cores(resolved)
    with stages.enough_memory():
        loaded = stages.load_models(resolved, processes, clock)
        sized = stages.size_engine(resolved, loaded, clock)
    info = stages.describe(resolved, loaded, sized)
    return Started(
        engine=stages.make_engine(loaded, sized, info),
        runner=sized.bound[0].runner,
        model=sized.bound[0],
        info=info,
        phases=clock.phases,
        upgrade=stages.start_upgrade(resolved, sized),
        rank_processes=processes,
    )
