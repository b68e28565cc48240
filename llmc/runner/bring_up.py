"""Program + weights -> a ModelRunner over caches of a measured size, and its better versions.

Last stage of start-up: a probe step tells what activations take, the pool gets what memory is
left, the step is bound; C++ ops and Inductor's code are exchanged in when they are ready.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmc.compiler.lower import StepFunction, lower
from llmc.compiler.program import Program, bind, lowered
from llmc.compiler.upgrade import Stage, Upgrade
from llmc.config import EngineConfig
from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.engine.swap import SwapCost, SwapRoom
from llmc.errors import ConfigError
from llmc.kernels.cpu.build import Build, load, start_build
from llmc.kernels.cpu.pages import touch_in_background
from llmc.runner import kv_cache
from llmc.runner.device import open_device
from llmc.runner.model_runner import ModelRunner
from llmc.runner.rows import RowTables
from llmc.runner.sizing import PeakMemory, free_bytes, size_pool
from llmc.runner.swap_space import SwapSpace
from llmc.runner.verify import LENGTHS, verify_packing
from llmc.sampling_params import SamplingParams

# Activations grow with tokens, so a short step tells, and starts faster.
_PROFILE_TOKENS_CPU = 256
_TOUCHED_BYTES = 512 << 20  # of the cache's first blocks, which the first requests write
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
    swap_room: SwapRoom | None  # host memory for preempted requests, and what it costs to use


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
    *,
    level: int,
    max_in_flight: int,
) -> SizedRunner:
    """Profile a step on a cache just large enough, size the pool from what is left, and bind."""
    per_token = kv_cache.bytes_per_token(program.caches)
    built = _kernels_are_built(build)
    graph = lowered(program)
    most_rows = config.max_num_seqs

    def make(
        num_blocks: int, length: int, *, can_swap: bool
    ) -> tuple[ModelRunner, dict[str, Tensor]]:
        caches = kv_cache.allocate(
            program.caches,
            num_blocks=num_blocks,
            block_size=config.block_size,
            device=device,
        )
        num_rows = max(most_rows, len(LENGTHS))
        states = kv_cache.allocate_states(program.states, num_rows=num_rows, device=device)
        rows = RowTables(
            num_rows=num_rows,
            max_model_len=length,
            block_size=config.block_size,
            vocab_size=program.vocab_size,
            device=device,
        )
        bound = bind(program, weights, caches, states)
        flat = [half for layer in caches for half in layer]
        runner = ModelRunner(
            lower(graph, bound),
            rows,
            max_tokens=max(config.max_num_batched_tokens, sum(LENGTHS)),
            caches=flat,
            swap_space=_swap_space(config, program, flat) if can_swap else None,
            device=open_device(device, max_in_flight=max_in_flight),
            buckets=config.cuda_graph_buckets,
            use_graphs=level >= 2,
            max_in_flight=max_in_flight,
        )
        return runner, bound

    tokens = min(config.max_num_batched_tokens, model_len)
    short = _PROFILE_TOKENS_CPU if built else _PROFILE_TOKENS_REFERENCE
    probed = min(tokens, short) if device.type == "cpu" else tokens
    blocks = max(-(-probed // config.block_size), sum(LENGTHS))
    probe, _ = make(blocks, max(probed, *LENGTHS), can_swap=False)
    peak = PeakMemory(device)
    peak.start()
    probe.execute(_profile_plan(probed, config.block_size))
    activations = peak.grown_by() * tokens // probed
    if built:
        peak.start()
        probe.rehearse(most_rows)
        activations = max(activations, peak.grown_by())
    activations += graphs_to_come(probe)
    prefill_seconds = 0.0
    if config.swap_space:
        start = time.perf_counter()
        probe.execute(_profile_plan(probed, config.block_size))
        prefill_seconds = (time.perf_counter() - start) / probed
    if not program.from_cache:
        verify_packing(probe, program.dtype)
        program.keep()
    del probe
    states = kv_cache.state_bytes(program.states) * (config.max_num_seqs + 1)
    available = free_bytes(device, config) - activations - states
    pool = size_pool(config, bytes_per_token=per_token, model_len=model_len, available=available)
    runner, bound = make(pool.num_blocks, pool.max_model_len, can_swap=True)
    if device.type == "cuda":
        runner.warm_up()
    elif runner.caches:
        touch_in_background(runner.caches, _TOUCHED_BYTES)
    return SizedRunner(
        runner=runner,
        bound=bound,
        kernels_built=built,
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
        cache_bytes=pool.cache_bytes,
        bytes_per_token=per_token,
        swap_room=_swap_room(runner.swap_space, prefill_seconds),
    )


def _swap_space(
    config: EngineConfig, program: Program, caches: Sequence[Tensor]
) -> SwapSpace | None:
    """Host memory as the user allows; none where a state that is not in blocks would be lost."""
    if not config.swap_space or program.states or not caches:
        return None
    block_bytes = sum(cache[0].nbytes for cache in caches)
    num_slots = config.swap_space // block_bytes
    if num_slots == 0:
        raise ConfigError(
            f"swap_space of {config.swap_space} bytes holds no block of {block_bytes} bytes; "
            "give more, or 0"
        )
    return SwapSpace(caches, num_slots)


def _swap_room(space: SwapSpace | None, prefill_seconds_per_token: float) -> SwapRoom | None:
    if space is None:
        return None
    cost = SwapCost(
        prefill_seconds_per_token=prefill_seconds_per_token,
        block_bytes=space.block_bytes,
        copy_bytes_per_second=space.measure(),
    )
    return SwapRoom(space.num_slots, cost)


def graphs_to_come(probe: ModelRunner) -> int:
    """Bytes that the decode graphs will take: the first two are captured and measured.

    The first, of the largest batch, makes the memory that all share; each further one adds
    what the second did.
    """
    sizes = len(probe.buckets.sizes)
    if probe.capture_next() is None:
        return 0
    first = probe.graph_bytes
    probe.capture_next()
    return first + (sizes - 1) * (probe.graph_bytes - first)


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
