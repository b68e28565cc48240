"""EngineConfig -> a running EngineCore: every phase of start-up, timed, in one place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.choices import (
    check_model_len,
    eos_token_ids,
    model_context,
    pick_async,
    pick_device,
    pick_dtype,
    pick_level,
    sampling_defaults,
)
from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.speculation import Speculation
from llmc.model_files import ModelFiles, load_config, resolve_model
from llmc.structured.begin import GrammarStarter

if TYPE_CHECKING:
    import torch

    from llmc.compiler.program import Program
    from llmc.compiler.upgrade import Upgrade
    from llmc.passes.pipeline import PipelineOptions
    from llmc.runner.model_runner import ModelRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One finished part of start-up."""

    name: str
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a front needs to know of the model that runs. Memory in bytes, lengths in tokens."""

    name: str
    path: Path
    tokenizer_path: Path | None
    max_model_len: int
    vocab_size: int  # the width of the logits
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_request: int  # of recurrent layers; 0 for a model that only attends
    is_builtin: bool
    opt_level: int
    pass_reports: tuple[str, ...] = ()
    generation_defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A running engine and how it came to run."""

    engine: EngineCore
    runner: ModelRunner
    info: ModelInfo
    phases: list[Phase]
    upgrade: Upgrade | None = None  # a compilation under way, whose result will be exchanged in


OnPhase = Callable[[Phase], None]


class PhaseClock:
    """Times phases and tells about each one as it ends."""

    def __init__(self, on_phase: OnPhase | None) -> None:
        self.phases: list[Phase] = []
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        """The block may append details to the list it is given."""
        start = time.perf_counter()
        detail: list[str] = []
        yield detail
        phase = Phase(name=name, seconds=time.perf_counter() - start, detail=", ".join(detail))
        self.phases.append(phase)
        if self._on_phase is not None:
            self._on_phase(phase)


def start_engine(config: EngineConfig, on_phase: OnPhase | None = None) -> Started:
    """Load, compile and size. Raises ConfigError, CheckpointError or CompileError."""
    clock = PhaseClock(on_phase)
    with clock.phase("read config") as detail:
        files = resolve_model(config)

        device = pick_device(config.device)
        hf_config = load_config(files, config)
        dtype = pick_dtype(config.dtype, hf_config, device)
        detail += [files.name, str(dtype).removeprefix("torch."), str(device)]
        check_model_len(config, hf_config)
    from llmc.kernels.cpu.build import cache_dir
    from llmc.runner import kv_cache
    from llmc.runner.bring_up import size_and_bind, start_kernels, start_upgrade

    build = start_kernels(device)
    level = pick_level(config.opt_level, device)
    in_flight = 2 if pick_async(config.async_scheduling, device) else 1
    model_len = config.max_model_len or model_context(hf_config)
    with clock.phase("compile") as detail:
        program = _compile(config, hf_config, dtype, device, model_len)
        matched = sum(1 for r in program.reports if r.added or r.removed)
        detail.append(f"{len(program.caches)} layers")
        if program.capture_note:
            detail.append(program.capture_note)
        detail += [f"{matched} passes matched", f"-O{level}"]
        if program.from_cache:
            detail.append("from cache")
    with clock.phase("load weights") as detail:
        weights = _load_weights(config, files, program)
        weight_bytes = sum({id(w): w.numel() * w.dtype.itemsize for w in weights.values()}.values())
        count = sum({id(w): w.numel() for w in weights.values()}.values())
        detail += [f"{count / 1e6:.1f}M parameters", f"{weight_bytes / 2**20:.0f} MiB"]
    with clock.phase("size cache") as detail:
        sized = size_and_bind(
            config, program, weights, model_len, device, build, level=level, max_in_flight=in_flight
        )
        detail += [
            f"{sized.num_blocks} blocks of {config.block_size} tokens",
            f"{sized.cache_bytes / 2**20:.0f} MiB",
            f"context {sized.max_model_len}",
        ]
        if sized.swap_room is not None:
            cost = sized.swap_room.cost
            detail.append(
                f"swap {sized.swap_room.num_slots} blocks at "
                f"{cost.copy_bytes_per_second / 1e9:.1f} GB/s against "
                f"{1 / cost.prefill_seconds_per_token:.0f} tokens/s"
            )
        if not sized.kernels_built:
            detail.append("C++ kernels are still being built: slow until then")
    eos = eos_token_ids(hf_config, files)
    tokenizer_path = files.path if files.has_tokenizer else None
    if config.tokenizer:
        tokenizer_path = Path(config.tokenizer)
    state_bytes = kv_cache.state_bytes(program.states)
    if state_bytes and config.enable_prefix_caching:
        log.info(
            "prefix caching is off: this model's recurrent layers keep one state a request, which "
            "holds for its newest token alone"
        )
    speculation = None
    if config.speculative_config is not None:
        if state_bytes:
            log.info(
                "speculative decoding is off: this model's recurrent layers keep one state a "
                "request, which can't go back to before a wrong guess"
            )
        else:
            speculation = Speculation(config.speculative_config)
    engine = EngineCore(
        sized.runner,
        num_blocks=sized.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=sized.max_model_len,
        vocab_size=program.vocab_size,
        eos_token_ids=eos,
        seed=config.seed,
        enable_prefix_caching=config.enable_prefix_caching and not state_bytes,
        share_prompts=not state_bytes,
        swap_room=sized.swap_room,
        max_num_queued=config.max_num_queued,
        scheduling_policy=config.scheduling_policy,
        speculation=speculation,
        grammars=GrammarStarter(tokenizer_path, vocab_size=program.vocab_size, eos_token_ids=eos),
    )
    info = ModelInfo(
        name=files.name,
        path=files.path,
        tokenizer_path=tokenizer_path,
        max_model_len=sized.max_model_len,
        vocab_size=program.vocab_size,
        eos_token_ids=eos,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        num_blocks=sized.num_blocks,
        block_size=config.block_size,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=sized.bytes_per_token,
        state_bytes_per_request=state_bytes,
        is_builtin=files.is_builtin,
        opt_level=level,
        pass_reports=tuple(str(r) for r in program.reports),
        generation_defaults=sampling_defaults(files),
    )
    upgrade = start_upgrade(program, sized, level, cache_dir())
    return Started(
        engine=engine, runner=sized.runner, info=info, phases=clock.phases, upgrade=upgrade
    )


def pipeline_options(config: EngineConfig, device: torch.device, model_len: int) -> PipelineOptions:
    """What the passes are told of the engine that `config` asks for."""
    from llmc.kernels.cpu.compile import streams_plain_weights
    from llmc.passes.pipeline import PipelineOptions

    return PipelineOptions(
        block_size=config.block_size,
        max_positions=model_len,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.quantization,
        device_type=device.type,
        streams_plain_weights=device.type == "cpu" and streams_plain_weights(),
    )


def _compile(
    config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device, model_len: int
) -> Program:
    from llmc.compiler.cache import ProgramCache
    from llmc.compiler.program import compile_program
    from llmc.kernels.cpu.build import cache_dir
    from llmc.passes.user import user_passes

    return compile_program(
        hf_config,
        dtype=dtype,
        device=device,
        options=pipeline_options(config, device, model_len),
        switches=config.passes,
        extra=user_passes(config.extra_passes),
        cache=None if config.trust_remote_code else ProgramCache(cache_dir()),
    )


def _load_weights(config: EngineConfig, files: ModelFiles, program: Program) -> dict[str, Any]:
    from llmc.compiler.checkpoint import open_checkpoint
    from llmc.compiler.program import load_weights, open_weights
    from llmc.compiler.weights import DummyWeights, WeightSource

    source: WeightSource
    if config.load_format == "dummy":
        source = DummyWeights(config.seed)
    else:
        source = open_weights(program, open_checkpoint(files.path))
    return load_weights(program, source)
