"""LoadedModel + number of blocks -> a ModelRunner over caches of that size."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, fx

from llmc.compiler.lower import lower
from llmc.compiler.program import Program, bind
from llmc.config import GRAPHS_LEVEL
from llmc.engine.kv.layout import WHOLE, AttentionWindow, CacheLayout
from llmc.engine.kv.swap import SwapConfig, SwapCost
from llmc.errors import ConfigError
from llmc.passes.tap_states import tap_names
from llmc.runner import kv_cache
from llmc.runner.adapter_store import AdapterStore, lora_targets, plain_weights
from llmc.runner.device import open_device
from llmc.runner.model_runner import ModelRunner
from llmc.runner.ranks import Kind, Order, Ranks
from llmc.runner.row_states import RowStates
from llmc.runner.rows import RowTables
from llmc.runner.swap_space import SwapSpace
from llmc.startup.compile import CompiledModel, LoadedModel, open_source
from llmc.startup.images import ImageModel
from llmc.startup.sizing import ModelProfile
from llmc.startup.verify_packing import LENGTHS
from llmc.weights.load import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMode:
    """How steps run."""

    level: int  # the optimization level that will finally run
    kernels_built: bool  # False: use references while the C++ ops are being built
    max_in_flight: int
    ranks: Ranks | None = None  # the tensor-parallel ranks that run each step


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundModel:
    """A runner with its cache, and what is needed to swap in a faster step."""

    runner: ModelRunner
    program: Program
    bound: dict[str, Tensor]  # the tensors of the step: weights, caches, constants
    kernels_built: bool
    adapters: AdapterStore | None = None
    swap_config: SwapConfig | None = None  # host memory for preempted requests, and its cost


def bind_model(
    model: LoadedModel,
    profile: ModelProfile,
    mode: StepMode,
    *,
    num_blocks: int,
    max_model_len: int,
    num_snapshots: int = 0,
    images: ImageModel | None = None,
    target: BoundModel | None = None,
) -> BoundModel:
    """Make the runner for serving. On a GPU, every kernel that a step may need is compiled here.

    `target`: the model that a draft head drafts for."""
    made = make_runner(
        model,
        profile.graph,
        mode,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        num_snapshots=num_snapshots,
        images=images,
        target=target,
    )
    runner = made.runner
    if model.program.device.type == "cuda":
        warm_up(runner)
        runner.capture_largest()
        while runner.capture_next() is not None:
            pass
    swap_config = _swap_config(runner.swap_space, profile.prefill_seconds_per_token)
    return replace(made, swap_config=swap_config)


def warm_up(runner: ModelRunner) -> None:
    """Compile every kernel that a step may need, and run each once."""
    compile_kernels(runner.warm_up)
    runner.warm_up()


def compile_kernels(run: Callable[[], None]) -> None:
    """Compile the kernels that `run` launches, several at a time, instead of running them."""
    if importlib.util.find_spec("triton") is not None:
        launch = importlib.import_module("llmc.kernels.triton.launch")
        with launch.compiling_together():
            run()


def make_runner(
    model: LoadedModel,
    graph: fx.GraphModule,
    mode: StepMode,
    *,
    num_blocks: int,
    max_model_len: int,
    num_snapshots: int = 0,
    can_swap: bool = True,
    images: ImageModel | None = None,
    target: BoundModel | None = None,
) -> BoundModel:
    """Allocate the cache and bind `graph`, the program with its kernels chosen. Runs nothing.

    A draft head without a `target` reads zeros. The other ranks of a tensor-parallel engine are
    ordered to do the same.
    """
    config, program = model.source.config, model.program
    if mode.ranks is not None:
        sizes = (
            *(num_blocks, max_model_len, num_snapshots),
            *(mode.max_in_flight, mode.level, can_swap),
        )
        mode.ranks.tell(Order(kind=Kind.MAKE_RUNNER, numbers=sizes))
    caches = kv_cache.allocate(
        program.caches, num_blocks=num_blocks, block_size=config.block_size, device=program.device
    )
    num_rows = max(config.max_num_seqs, len(LENGTHS))
    states = kv_cache.allocate_states(
        program.states, num_rows=num_rows, num_snapshots=num_snapshots, device=program.device
    )
    rows = RowTables(
        num_rows=num_rows,
        max_model_len=max_model_len,
        block_size=config.block_size,
        vocab_size=program.vocab_size,
        device=program.device,
        extra=RowStates(program.processors, program.vocab_size).tables,
        num_groups=num_tables(model),
    )
    rank = 0 if mode.ranks is None else mode.ranks.rank
    bound = bind(program, model.weights, caches, states, rank, _taps(program, num_blocks, target))
    # caches of sparse indexers only have keys
    halves = [half for layer in caches for half in layer if half.numel()]
    adapters = _adapters(model, bound, mode.ranks)
    runner = ModelRunner(
        lower(graph, bound),
        rows,
        max_tokens=max(config.max_num_batched_tokens, sum(LENGTHS)),
        caches=halves,
        states=states,
        swap_space=_swap_space(model, halves) if can_swap else None,
        adapters=adapters,
        device=open_device(program.device, max_in_flight=mode.max_in_flight),
        buckets=config.cuda_graph_buckets,
        use_graphs=mode.level >= GRAPHS_LEVEL,
        max_in_flight=mode.max_in_flight,
        pools=model.source.pooling is not None,
        ranks=mode.ranks,
        images=None if images is None else images.bind(caches, states, program, bound),
    )
    return BoundModel(
        runner=runner,
        program=program,
        bound=bound,
        kernels_built=mode.kernels_built,
        adapters=adapters,
    )


def _adapters(
    model: LoadedModel, bound: dict[str, Tensor], ranks: Ranks | None
) -> AdapterStore | None:
    config, program = model.source.config, model.program
    if not config.enable_lora:
        return None
    targets = lora_targets(program, bound)
    if not targets:
        raise ConfigError(
            "enable_lora is set, but the model has no linear layer that adapters could apply to "
            "(is the pass apply_lora switched off?)"
        )

    @cache
    def open_once() -> WeightSource:
        compiled = CompiledModel(source=model.source, program=program, key="", built=None)
        return open_source(compiled)

    return AdapterStore(
        targets,
        program.parameters,
        plain_weights(program, bound, open_once),
        num_slots=config.max_loras,
        max_in_memory=config.max_cpu_loras or config.max_loras,
        max_expert_rank=config.max_lora_expert_rank,
        ranks=ranks,
    )


def _taps(program: Program, num_blocks: int, target: BoundModel | None) -> list[Tensor]:
    """The caches that a draft head reads: those of the target, which has as many blocks."""
    if target is not None and program.tap_shapes:
        return [target.bound[name] for name in tap_names(target.program.graph.graph)]
    return [
        torch.zeros(num_blocks, *shape, dtype=program.dtype, device=program.device)
        for shape in program.tap_shapes
    ]


def num_tables(model: LoadedModel) -> int:
    """Number of block tables per row: one per group of layers, and a draft head's target's."""
    return cache_layout(model).num_groups + bool(model.program.tap_shapes)


def cache_layout(model: LoadedModel) -> CacheLayout:
    """The cache layout. Windows as long as the context, and all windows if the pass group_caches is
    off, count as full attention."""
    config = model.source.config
    is_on = config.passes.get("group_caches", True)
    windows = tuple(
        AttentionWindow(window=g.window, chunk=g.chunk).within(model.source.model_len)
        if is_on
        else WHOLE
        for g in model.program.groups
    )
    return CacheLayout(
        block_size=config.block_size,
        step_tokens=config.max_num_batched_tokens,
        windows=windows or (WHOLE,),
    )


def why_not_swapped(model: LoadedModel) -> str:
    """Why preempted requests of this model are always recomputed; "" if they can be swapped."""
    if model.program.states:
        return "recurrent states are not in blocks"
    if not model.program.caches:
        return "there is no KV cache"
    return ""


def _swap_space(model: LoadedModel, caches: Sequence[Tensor]) -> SwapSpace | None:
    """Host memory as configured, if the model's requests can be swapped."""
    config = model.source.config
    if not config.swap_space or why_not_swapped(model):
        return None
    block_bytes = sum(cache[0].nbytes for cache in caches)
    num_slots = config.swap_space // block_bytes
    if num_slots == 0:
        raise ConfigError(
            f"swap_space of {config.swap_space} bytes is too small for one block of {block_bytes} "
            "bytes; raise it, or set it to 0"
        )
    return SwapSpace(caches, num_slots)


def _swap_config(space: SwapSpace | None, prefill_seconds_per_token: float) -> SwapConfig | None:
    if space is None:
        return None
    cost = SwapCost(
        prefill_seconds_per_token=prefill_seconds_per_token,
        block_bytes=space.block_bytes,
        copy_bytes_per_second=space.measure(),
    )
    return SwapConfig(space.num_slots, cost)
