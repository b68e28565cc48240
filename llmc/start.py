"""EngineConfig -> a running EngineCore: every phase of start-up, timed, in one place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.choices import pick_async, pick_device, pick_level, sampling_defaults
from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.speculation import Speculation
from llmc.load import LoadedModel, compile_model, find_model, load_model
from llmc.start_draft import draft_in_flight, find_draft, load_draft, speculate
from llmc.structured.begin import GrammarStarter

if TYPE_CHECKING:
    from llmc.compiler.upgrade import Upgrade
    from llmc.runner.model_runner import ModelRunner
    from llmc.runner.profile import ProfiledModel

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
    pool_tokens: int  # of the longest sequence that the blocks hold, alone
    blocks_per_request: int  # that one of max_model_len tokens holds at most
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_request: int  # of recurrent layers; 0 for a model that only attends
    is_builtin: bool
    opt_level: int
    pass_reports: tuple[str, ...] = ()
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()  # that its logits processors know


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
        device = pick_device(config.device)
        source = find_model(config, device)
        draft_source = find_draft(source)
        dtype = str(source.dtype).removeprefix("torch.")
        detail += [source.files.name, dtype, str(device)]
    from llmc.kernels.cpu.build import cache_dir
    from llmc.kernels.cpu.threads import limit_threads
    from llmc.runner import kv_cache
    from llmc.runner.bring_up import kernels_are_built, size_pools, start_kernels, start_upgrade
    from llmc.runner.row_states import RowStates

    if device.type == "cpu":
        limit_threads()
    build = start_kernels(device)
    level = pick_level(config.opt_level, device)
    in_flight = 2 if pick_async(config.async_scheduling, device) else 1
    with clock.phase("compile") as detail:
        program = compile_model(source)
        matched = sum(1 for r in program.reports if r.changed)
        detail.append(f"{program.num_layers} layers")
        if program.capture_note:
            detail.append(program.capture_note)
        detail += [f"{matched} passes matched", f"-O{level}"]
        if program.from_cache:
            detail.append("from cache")
    with clock.phase("load weights") as detail:
        model = load_model(source, program)
        detail += [
            f"{model.num_parameters / 1e6:.1f}M parameters",
            f"{model.weight_bytes / 2**20:.0f} MiB",
        ]
    state_bytes = kv_cache.state_bytes(program.states)
    if state_bytes and config.enable_prefix_caching:
        log.info(
            "prefix caching is off: this model's recurrent layers keep one state a request, which "
            "holds for its newest token alone"
        )
    drafting = config.speculative_config
    if state_bytes and drafting is not None:
        drafting = None
        log.info(
            "speculative decoding is off: this model's recurrent layers keep one state a "
            "request, which can't go back to before a wrong guess"
        )
    draft = None
    if drafting is not None and draft_source is not None:
        with clock.phase("draft model") as detail:
            draft = load_draft(draft_source)
            detail += [draft.source.files.name, f"{draft.weight_bytes / 2**20:.0f} MiB"]
    with clock.phase("size cache") as detail:
        built = kernels_are_built(build)
        profiled = [_profile(model, built, level, in_flight)]
        if drafting is not None and draft is not None:
            profiled.append(_profile(draft, built, level, draft_in_flight(drafting, device)))
        pool = size_pools(config, device, profiled)
        bound = [
            one.bind(pool.num_blocks, min(pool.max_model_len, one.model_len)) for one in profiled
        ]
        detail += [
            f"{pool.num_blocks} blocks of {config.block_size} tokens",
            f"{pool.cache_bytes / 2**20:.0f} MiB",
            f"context {pool.max_model_len}",
        ]
        swap_room = bound[0].swap_room
        if swap_room is not None:
            detail.append(
                f"swap {swap_room.num_slots} blocks at "
                f"{swap_room.cost.copy_bytes_per_second / 1e9:.1f} GB/s against "
                f"{1 / swap_room.cost.prefill_seconds_per_token:.0f} tokens/s"
            )
        if not built:
            detail.append("C++ kernels are still being built: slow until then")
    speculation = None
    if drafting is not None:
        speculation = Speculation(drafting)
        if draft is not None:
            speculation = speculate(drafting, draft, bound[1].runner, model, pool)
    eos = source.eos_token_ids
    engine = EngineCore(
        bound[0].runner,
        num_blocks=pool.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=pool.max_model_len,
        vocab_size=program.vocab_size,
        eos_token_ids=eos,
        seed=config.seed,
        enable_prefix_caching=config.enable_prefix_caching and not state_bytes,
        share_prompts=not state_bytes,
        swap_room=swap_room,
        max_num_queued=config.max_num_queued,
        scheduling_policy=config.scheduling_policy,
        speculation=speculation,
        reaches=profiled[0].layout.reaches,
        grammars=GrammarStarter(
            source.tokenizer_path, vocab_size=program.vocab_size, eos_token_ids=eos
        ),
        row_states=RowStates(program.processors, program.vocab_size),
    )
    info = ModelInfo(
        name=source.files.name,
        path=source.files.path,
        tokenizer_path=source.tokenizer_path,
        max_model_len=pool.max_model_len,
        vocab_size=program.vocab_size,
        eos_token_ids=eos,
        dtype=dtype,
        device=str(device),
        num_blocks=pool.num_blocks,
        block_size=config.block_size,
        pool_tokens=pool.pool_tokens,
        blocks_per_request=profiled[0].layout.blocks_for(pool.max_model_len),
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=program.kv_bytes_per_token,
        state_bytes_per_request=state_bytes,
        is_builtin=source.files.is_builtin,
        opt_level=level,
        pass_reports=tuple(str(r) for r in program.reports),
        generation_defaults=sampling_defaults(source.files),
        extra_args=tuple(name for p in program.processors for name in p.arguments),
    )
    upgrade = start_upgrade(bound, level, cache_dir())
    return Started(
        engine=engine, runner=bound[0].runner, info=info, phases=clock.phases, upgrade=upgrade
    )


def _profile(model: LoadedModel, built: bool, level: int, max_in_flight: int) -> ProfiledModel:
    from llmc.runner.profile import ProfiledModel

    return ProfiledModel(
        model.source.config,
        model.program,
        model.weights,
        model.source.model_len,
        model.source.device,
        kernels_built=built,
        level=level,
        max_in_flight=max_in_flight,
    )
