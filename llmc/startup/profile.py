"""ProfiledModel: a program with weights that has run a step on a small cache, and then a real one.

What the step was seen to take beside its cache says how large the cache may be (bring_up.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.compiler.lower import lower
from llmc.compiler.program import Program, bind, lowered
from llmc.config import EngineConfig
from llmc.engine.kv.layout import WHOLE, AttentionWindow, CacheLayout
from llmc.engine.kv.swap import SwapCost, SwapRoom
from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.errors import ConfigError
from llmc.kernels.cpu.pages import touch_in_background
from llmc.runner import kv_cache
from llmc.runner.device import open_device
from llmc.runner.model_runner import ModelRunner
from llmc.runner.row_states import RowStates
from llmc.runner.rows import RowTables
from llmc.runner.swap_space import SwapSpace
from llmc.sampling_params import SamplingParams
from llmc.startup.sizing import PeakMemory
from llmc.startup.verify_packing import LENGTHS, verify_packing

# Activations grow with tokens, so a short step tells, and starts faster.
_PROFILE_TOKENS_CPU = 256
_PROFILE_TOKENS_REFERENCE = 16  # on the references, which are slow
_TOUCHED_BYTES = 512 << 20  # of the cache's first blocks, which the first requests write


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRunner:
    """A runner over its own cache, and what is needed to exchange its step for a better one."""

    runner: ModelRunner
    program: Program
    bound: dict[str, Tensor]  # the tensors of the step: weights, caches, constants
    kernels_built: bool  # False: the step runs on references while the C++ ops are built
    swap_room: SwapRoom | None  # host memory for preempted requests, and what it costs to use


class ProfiledModel:
    """Sizes in bytes. `bytes_beside` is what it takes next to weights and cache, `bytes_per_token`
    what a token takes in one group of layers."""

    def __init__(
        self,
        config: EngineConfig,
        program: Program,
        weights: dict[str, Tensor],
        model_len: int,
        device: torch.device,
        *,
        kernels_built: bool,
        level: int,
        max_in_flight: int,
    ) -> None:
        self._config = config
        self._program = program
        self._weights = weights
        self._device = device
        self._kernels_built = kernels_built
        self._level = level
        self._max_in_flight = max_in_flight
        self._graph = lowered(program)
        self.model_len = model_len
        self.layout = cache_layout(config, program, model_len)
        self.bytes_per_token = kv_cache.bytes_per_token(program.caches)
        self._prefill_seconds_per_token = 0.0
        states = kv_cache.state_bytes(program.states) * (config.max_num_seqs + 1)
        self.bytes_beside = self._profile() + states

    def bind(self, num_blocks: int, max_model_len: int) -> BoundRunner:
        """Over a cache of so many blocks, for contexts of so many tokens."""
        runner, bound = self._make(num_blocks, max_model_len, can_swap=True)
        if self._device.type == "cuda":
            runner.warm_up()
            while runner.capture_next() is not None:
                pass
        elif runner.caches:
            touch_in_background(runner.caches, _TOUCHED_BYTES)
        return BoundRunner(
            runner=runner,
            program=self._program,
            bound=bound,
            kernels_built=self._kernels_built,
            swap_room=_swap_room(runner.swap_space, self._prefill_seconds_per_token),
        )

    def _make(
        self, num_blocks: int, max_model_len: int, *, can_swap: bool
    ) -> tuple[ModelRunner, dict[str, Tensor]]:
        config, program, device = self._config, self._program, self._device
        caches = kv_cache.allocate(
            program.caches, num_blocks=num_blocks, block_size=config.block_size, device=device
        )
        num_rows = max(config.max_num_seqs, len(LENGTHS))
        states = kv_cache.allocate_states(program.states, num_rows=num_rows, device=device)
        rows = RowTables(
            num_rows=num_rows,
            max_model_len=max_model_len,
            block_size=config.block_size,
            vocab_size=program.vocab_size,
            device=device,
            extra=RowStates(program.processors, program.vocab_size).tables,
            num_groups=self.layout.num_groups,
        )
        bound = bind(program, self._weights, caches, states)
        flat = [half for layer in caches for half in layer]
        runner = ModelRunner(
            lower(self._graph, bound),
            rows,
            max_tokens=max(config.max_num_batched_tokens, sum(LENGTHS)),
            caches=flat,
            swap_space=_swap_space(config, program, flat) if can_swap else None,
            device=open_device(device, max_in_flight=self._max_in_flight),
            buckets=config.cuda_graph_buckets,
            use_graphs=self._level >= 2,
            max_in_flight=self._max_in_flight,
        )
        return runner, bound

    def _profile(self) -> int:
        """-> bytes of activations and graphs. The probe and its cache are gone afterwards."""
        config, device = self._config, self._device
        tokens = min(config.max_num_batched_tokens, self.model_len)
        short = _PROFILE_TOKENS_CPU if self._kernels_built else _PROFILE_TOKENS_REFERENCE
        probed = min(tokens, short) if device.type == "cpu" else tokens
        groups, blocks = self.layout.num_groups, -(-probed // config.block_size)
        plan = _profile_plan(probed, blocks * groups)
        num_blocks = max(blocks, sum(LENGTHS)) * groups
        probe, _ = self._make(num_blocks, max(probed, *LENGTHS), can_swap=False)
        peak = PeakMemory(device)
        peak.start()
        probe.execute(plan)
        activations = peak.grown_by() * tokens // probed
        if self._kernels_built:
            peak.start()
            probe.rehearse(config.max_num_seqs)
            activations = max(activations, peak.grown_by())
        activations += graphs_to_come(probe)
        if config.swap_space:
            start = time.perf_counter()
            probe.execute(plan)
            self._prefill_seconds_per_token = (time.perf_counter() - start) / probed
        if not self._program.from_cache:
            verify_packing(probe, self._program.dtype)
            self._program.keep()
        return activations


def cache_layout(config: EngineConfig, program: Program, model_len: int) -> CacheLayout:
    """A window as long as the context, or one whose pass is off, lets nothing go."""
    is_on = config.passes.get("group_caches", True)
    windows = tuple(
        AttentionWindow(window=g.window, chunk=g.chunk).within(model_len) if is_on else WHOLE
        for g in program.groups
    )
    return CacheLayout(
        block_size=config.block_size,
        step_tokens=config.max_num_batched_tokens,
        windows=windows or (WHOLE,),
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


def _profile_plan(tokens: int, num_blocks: int) -> StepPlan:
    """One request that fills a whole prefill step, in the first of these blocks."""
    new = NewRow(
        row=0,
        request_id="profile",
        token_ids=[0] * tokens,
        num_prompt_tokens=tokens,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        stop_token_ids=(),
    )
    work = RowWork(row=0, start=0, num_tokens=tokens, sample=True, new_blocks=range(num_blocks))
    return StepPlan(step=0, new_rows=(new,), work=(work,))
