"""Program + weights -> a ModelRunner over caches of a measured size, and its better versions.

Last stage of start-up: a probe step tells what activations take, the pool gets what memory is
left, the step is bound; C++ ops and Inductor's code are exchanged in when they are ready.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmc.compiler.lower import StepFunction, lower
from llmc.compiler.program import Program, bind, lowered
from llmc.compiler.upgrade import Stage, Upgrade
from llmc.config import EngineConfig
from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.kernels.cpu.build import Build, load, start_build
from llmc.runner import kv_cache
from llmc.runner.model_runner import ModelRunner
from llmc.runner.rows import RowTables
from llmc.runner.sizing import PeakMemory, free_bytes, size_pool
from llmc.runner.verify import LENGTHS, verify_packing
from llmc.sampling_params import SamplingParams

# Activations grow with tokens, so a short step tells, and starts faster.
_PROFILE_TOKENS_CPU = 256
_PROFILE_TOKENS_REFERENCE = 16  # on the references, which are slow


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRunner:
    runner: ModelRunner
    bound: dict[str, Tensor]  # the tensors of the step: weights, caches, constants
    kernels_built: bool  # False: the step runs on references while the C++ ops are built
    num_blocks: int
    max_model_len: int
    cache_bytes: int
    bytes_per_token: int


def start_kernels(device: torch.device) -> Build | None:
    """Make the device's kernels known. On CPU a C++ compiler may have to build them first: it
    works in processes of its own while the model is captured, and nobody waits for it."""
    if device.type == "cpu":
        return start_build()
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module("llmc.kernels.triton")
    return None


def _kernels_are_built(build: Build | None) -> bool:
    """Load the C++ ops if they are there; False while they are being built."""
    if build is None:
        return True
    if not build.done:
        return False
    load()  # False where they can't be built: the references are all there is
    return True


def size_and_bind(
    config: EngineConfig,
    program: Program,
    weights: dict[str, Tensor],
    model_len: int,
    device: torch.device,
    build: Build | None,
) -> SizedRunner:
    """Profile a step on a cache just large enough, size the pool from what is left, and bind."""
    per_token = kv_cache.bytes_per_token(program.caches, program.dtype)
    built = _kernels_are_built(build)
    graph = lowered(program)

    def make(num_blocks: int, length: int, num_rows: int) -> tuple[ModelRunner, dict[str, Tensor]]:
        caches = kv_cache.allocate(
            program.caches,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=program.dtype,
            device=device,
        )
        rows = RowTables(
            num_rows=num_rows,
            max_model_len=length,
            block_size=config.block_size,
            vocab_size=program.vocab_size,
            device=device,
        )
        bound = bind(program, weights, caches)
        return ModelRunner(lower(graph, bound), rows), bound

    tokens = min(config.max_num_batched_tokens, model_len)
    short = _PROFILE_TOKENS_CPU if built else _PROFILE_TOKENS_REFERENCE
    probed = min(tokens, short) if device.type == "cpu" else tokens
    probe, _ = make(max(-(-probed // config.block_size), sum(LENGTHS)), max(probed, *LENGTHS), 2)
    peak = PeakMemory(device)
    peak.start()
    probe.execute(_profile_plan(probed, config.block_size))
    activations = peak.grown_by() * tokens // probed
    if not program.from_cache:
        verify_packing(probe, program.dtype)
        program.keep()
    del probe
    available = free_bytes(device, config) - activations
    pool = size_pool(config, bytes_per_token=per_token, model_len=model_len, available=available)
    runner, bound = make(pool.num_blocks, pool.max_model_len, config.max_num_seqs)
    return SizedRunner(
        runner=runner,
        bound=bound,
        kernels_built=built,
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
        cache_bytes=pool.cache_bytes,
        bytes_per_token=per_token,
    )


def start_upgrade(
    program: Program, sized: SizedRunner, level: int, cache_dir: Path
) -> Upgrade | None:
    """Exchange the step for better ones as they get ready: C++ ops, then Inductor's code."""
    runner = sized.runner

    def with_kernels() -> StepFunction | None:
        return lower(lowered(program), sized.bound) if load() else None

    def compiled() -> StepFunction:
        from llmc.compiler.inductor import compile_step  # imports the whole compiler

        return compile_step(
            lowered(program),
            sized.bound,
            runner.rows.tables,
            level=level,
            cache_dir=cache_dir,
        )

    def install(step: StepFunction) -> None:
        runner.step = step

    stages: list[Stage] = []
    if not sized.kernels_built:
        stages.append(with_kernels)
    if level >= 1:
        stages.append(compiled)
    if not stages:
        return None
    upgrade = Upgrade(stages, install)
    upgrade.start()
    return upgrade


def _profile_plan(tokens: int, block_size: int) -> StepPlan:
    """One request that fills a whole prefill step."""
    blocks = range(-(-tokens // block_size))
    new = NewRow(
        row=0,
        request_id="profile",
        token_ids=[0] * tokens,
        num_prompt_tokens=tokens,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        stop_token_ids=(),
    )
    work = RowWork(row=0, start=0, num_tokens=tokens, sample=True, new_blocks=tuple(blocks))
    return StepPlan(step=0, new_rows=(new,), work=(work,))
