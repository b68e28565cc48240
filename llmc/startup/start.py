"""EngineConfig -> a running EngineCore: all of start-up, in order, with every phase timed.

    check paths -> resolve -> compile (build, capture, rewrite, or the cache) -> load weights
    -> profile -> size -> bind -> engine; faster steps are compiled in the background

Every stage is a function from one frozen dataclass to the next. A draft model goes through the
same stages. torch is imported after the paths are checked.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.options import MAX_SCORED, EngineFeatures, EngineLimits
from llmc.engine.spec_decode.ngram import NgramSpeculation
from llmc.engine.spec_decode.speculation import Speculation
from llmc.garbage import without_collections
from llmc.model_info import ModelInfo, OnPhase, Phase
from llmc.speculative_config import SpeculativeConfig
from llmc.startup.model_files import Location, locate, resolve_model
from llmc.startup.resolve import (
    check_paths,
    pick_async,
    pick_device,
    pick_level,
    resolve,
)
from llmc.structured.begin import GrammarStarter

if TYPE_CHECKING:
    from llmc.runner.model_runner import ModelRunner
    from llmc.startup.background import Upgrade
    from llmc.startup.bind import BoundModel
    from llmc.startup.compile import LoadedModel
    from llmc.startup.sizing import ModelProfile, PoolSize
    from llmc.startup.tensor_parallel import RankProcesses

log = logging.getLogger(__name__)


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


class PhaseClock:
    """Times phases, appends each to `phases` when it ends, and calls `on_phase` with it."""

    def __init__(self, on_phase: OnPhase | None) -> None:
        self.phases: list[Phase] = []
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        """Time a block, which may append details to the list that it receives."""
        start = time.perf_counter()
        detail: list[str] = []
        yield detail
        phase = Phase(name=name, seconds=time.perf_counter() - start, detail=", ".join(detail))
        self.phases.append(phase)
        if self._on_phase is not None:
            self._on_phase(phase)


def start_engine(config: EngineConfig, on_phase: OnPhase | None = None) -> Started:
    """Start an engine. Raises ConfigError, CheckpointError or CompileError, or EngineDeadError if
    another rank of a tensor-parallel engine does not start."""
    clock = PhaseClock(on_phase)
    with without_collections():  # start-up creates many objects and hardly any cycles
        return _start_ranks(config, clock)


def keep_forever() -> None:
    """Leave everything that exists out of garbage collections, for a process that serves one engine
    to its end. Modules and the graph are a million objects: going through them takes 0.1 to 0.3 s,
    in which no request advances."""
    gc.freeze()


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
            downloaded = resolve_model(config)
            location = Location(name=downloaded.name, path=downloaded.path)
    with clock.phase("import torch"):
        from llmc.cache_dir import cache_dir
        from llmc.compiler.cache import ProgramCache
        from llmc.kernels.cpu.threads import limit_threads
        from llmc.startup import draft_model
        from llmc.startup.architecture_certificate import (
            ArchitectureCertificates,
            architecture_key,
            disable_faulty_passes,
        )
        from llmc.startup.background import (
            compile_in_background,
            kernels_are_built,
            start_kernels,
            wait_for_kernels,
        )
        from llmc.startup.bind import StepMode, bind_model
        from llmc.startup.compile import compile_model, keep, load_model
        from llmc.startup.config_facts import FactsCache
        from llmc.startup.images import ImageModel, NoImages, load_images
        from llmc.startup.profile import profile_model
        from llmc.startup.sizing import size_pools
        from llmc.startup.tensor_parallel import check_source, share_threads

    device = pick_device(config.device)
    build = start_kernels(device)
    with clock.phase("read GGUF") if location.is_new else nullcontext():
        files = location.files()
    level = pick_level(config.opt_level, device)
    programs, facts = ProgramCache(cache_dir()), FactsCache(cache_dir())
    is_known = facts.load(files, config) is not None
    with clock.phase("read config" if is_known else "import transformers") as detail:
        source = resolve(config, device, files=files, facts_cache=facts)
        certificate_key = architecture_key(source)
        known = ArchitectureCertificates(cache_dir()).load(certificate_key)
        source, disabled = disable_faulty_passes(source, known)
        draft_source = draft_model.resolve_draft(source, facts)
        source = draft_model.tapped(source, draft_source)
        detail += [source.files.name, source.dtype_name, str(device)]

    if disabled:
        log.warning("disabled passes, since this model is wrong with them: %s", ", ".join(disabled))
    if device.type == "cpu":
        limit_threads()
        if config.distributed_executor_backend != "ray":  # Ray assigns the cores
            share_threads(config.tensor_parallel_size * config.data_parallel_size)
    if processes is not None:
        check_source(source)
    with clock.phase("compile") as detail:
        compiled = compile_model(source, programs)
        program = compiled.program
        draft_model.check_width(draft_source, source, program)
        matched = sum(1 for r in program.reports if r.changed)
        notes = [program.capture_note] if program.capture_note else []
        layers = [f"{program.num_layers} layers"] if program.num_layers else []  # with a KV cache
        detail += [*layers, *notes]
        detail += [f"{matched} passes matched", f"-O{level}"]
        detail += ["from cache"] if program.from_cache else []
        if processes is not None:
            processes.send(source, program)
    with clock.phase("load weights") as detail:
        model = load_model(compiled)
        detail += [
            f"{model.num_parameters / 1e6:.1f}M parameters",
            f"{model.weight_bytes / 2**20:.0f} MiB",
        ]
        ranks = None
        if processes is not None:
            ranks = processes.join(device)
            detail.append(f"on each of {ranks.size} ranks")

    images: ImageModel | NoImages
    if source.facts.unused_parts:
        with clock.phase("images") as detail:
            images = load_images(model, programs)
            detail.append("refused" if isinstance(images, NoImages) else "read")
    else:
        images = NoImages(reason="it reads text only")
    drafting = _speculation_config(config, model)
    compiled_models, models = [compiled], [model]
    in_flight = [2 if pick_async(config.async_scheduling, device) else 1]
    if drafting is not None and draft_source is not None:
        with clock.phase("draft model") as detail:
            compiled_models.append(compile_model(draft_source, programs))
            models.append(draft_model.load_draft(compiled_models[-1], compiled, model))
            in_flight.append(draft_model.draft_in_flight(drafting, device))
            detail += [draft_source.files.name, f"{models[-1].weight_bytes / 2**20:.0f} MiB"]

    if (
        build is not None
        and not build.done
        and any(c.program.keeps_low_bits for c in compiled_models)
    ):
        with clock.phase("build C++ ops"):
            wait_for_kernels(build)
    with clock.phase("profile"):
        built = kernels_are_built(build)
        modes = [StepMode(level=level, kernels_built=built, max_in_flight=n) for n in in_flight]
        modes[0] = replace(modes[0], ranks=ranks)
        profiles = [
            profile_model(one, mode, key=each.key, cache=programs)
            for each, one, mode in zip(compiled_models, models, modes, strict=True)
        ]
        if isinstance(images, ImageModel):
            keep(images.compiled, programs)
    with clock.phase("size cache") as detail:
        if isinstance(images, ImageModel) and device.type == "cuda":
            beside = profiles[0].overhead_bytes + images.overhead_bytes
            profiles[0] = replace(profiles[0], overhead_bytes=beside)
        caches = _caches_prefixes(model)
        state_bytes = model.state_bytes if caches else 0
        pool = size_pools(config, device, profiles, source.model_len, ranks, state_bytes)
        bound: list[BoundModel] = []
        for one, profile, mode in zip(models, profiles, modes, strict=True):
            made = bind_model(
                one,
                profile,
                mode,
                num_blocks=pool.num_blocks,
                max_model_len=min(pool.max_model_len, one.source.model_len),
                num_snapshots=pool.num_snapshots,
                images=images if one is model and isinstance(images, ImageModel) else None,
                target=bound[0] if bound else None,
            )
            bound.append(made)
        detail += _cache_details(model, pool, bound[0])
        if state_bytes and not pool.num_snapshots:
            log.info(
                "prefix caching is off: one state of this model's recurrent layers takes %.0f MiB, "
                "more than an eighth of the cache memory; raise kv_cache_memory",
                state_bytes / 2**20,
            )
        if build is not None and not built:
            detail.append(f"{build.progress}: slow until then")

    speculation: Speculation | None = None
    if drafting is not None:
        speculation = (
            NgramSpeculation(drafting)
            if len(models) == 1
            else draft_model.speculate(drafting, models[1], bound[1].runner, model, pool)
        )
    whole_images = isinstance(images, ImageModel) and images.info.most_rows > 0
    engine = _make_engine(model, profiles[0], bound[0], pool, speculation, whole_images)
    info = replace(
        _describe(model, profiles[0], pool, level),
        certificate_key=certificate_key,
        disabled_passes=disabled,
        images=images.info if isinstance(images, ImageModel) else None,
        image_refusal=images.reason if isinstance(images, NoImages) else "",
    )
    upgrade = compile_in_background(bound, level, cache_dir())
    return Started(
        engine=engine,
        runner=bound[0].runner,
        model=bound[0],
        info=info,
        phases=clock.phases,
        upgrade=upgrade,
        rank_processes=processes,
    )


def _speculation_config(config: EngineConfig, model: LoadedModel) -> SpeculativeConfig | None:
    """None, with a log line, if the model's state can't be rolled back."""
    if why := _reads_all_of_a_text(model):
        if config.enable_prefix_caching:
            log.info("prefix caching is off: %s", why)
        return None
    if model.state_bytes and config.speculative_config is not None:
        log.info(
            "speculative decoding is off: this model's recurrent layers keep one state per "
            "request, which can't be rolled back after a rejected token"
        )
        return None
    return config.speculative_config


def _reads_all_of_a_text(model: LoadedModel) -> str:
    """Why sequences with a common prefix can't share its cache; "" if they can."""
    pooling = model.source.pooling
    if model.source.facts.is_encoder:
        return "an encoder's tokens see later ones"
    if pooling is not None and pooling.method != "last":
        return f"{pooling.method} pooling reads every token"
    return ""


def _caches_prefixes(model: LoadedModel) -> bool:
    return model.source.config.enable_prefix_caching and not _reads_all_of_a_text(model)


def _cache_details(model: LoadedModel, pool: PoolSize, bound: BoundModel) -> list[str]:
    details = [
        f"{pool.num_blocks} blocks of {model.source.config.block_size} tokens",
        f"{pool.cache_bytes / 2**20:.0f} MiB",
        f"context {pool.max_model_len}",
    ]
    if pool.num_snapshots:
        taken = pool.num_snapshots * model.state_bytes
        details.append(f"{pool.num_snapshots} state snapshots, {taken / 2**20:.0f} MiB")
    if bound.swap_config is not None:
        cost = bound.swap_config.cost
        details.append(
            f"swap {bound.swap_config.num_slots} blocks at "
            f"{cost.copy_bytes_per_second / 1e9:.1f} GB/s against "
            f"{1 / cost.prefill_seconds_per_token:.0f} tokens/s"
        )
    return details


def _make_engine(
    model: LoadedModel,
    profile: ModelProfile,
    bound: BoundModel,
    pool: PoolSize,
    speculation: Speculation | None,
    whole_images: bool,
) -> EngineCore:
    from llmc.runner.row_states import RowStates

    config, program = model.source.config, model.program
    is_encoder = model.source.facts.is_encoder
    has_states = bool(model.state_bytes) or is_encoder  # blocks do not hold all of a prompt's past
    # A checkpoint may name an end token beyond its logits. It can't be sampled, and must not be
    # used as an index.
    eos = tuple(t for t in model.source.eos_token_ids if 0 <= t < program.vocab_size)
    return EngineCore(
        bound.runner,
        EngineLimits(
            num_blocks=pool.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=pool.max_model_len,
            vocab_size=program.vocab_size,
            max_num_scored_tokens=(
                MAX_SCORED if model.source.pooling is None else config.max_num_batched_tokens
            ),
            max_num_queued=config.max_num_queued,
        ),
        EngineFeatures(
            eos_token_ids=eos,
            seed=config.seed,
            enable_prefix_caching=_caches_prefixes(model)
            and bool(pool.num_snapshots or not has_states),
            share_prompts=not has_states,
            num_snapshots=pool.num_snapshots,
            swap_config=bound.swap_config,
            scheduling_policy=config.scheduling_policy,
            speculation=speculation,
            windows=profile.layout.windows,
            long_context_from=model.source.long_context_from,
            grammars=GrammarStarter(
                model.source.tokenizer_path, vocab_size=program.vocab_size, eos_token_ids=eos
            ),
            adapters=bound.adapters,
            whole_images=whole_images,
            whole_prompts=is_encoder,
            one_prompt=program.single_sequence,
            row_states=RowStates(program.processors, program.vocab_size),
        ),
    )


def _describe(model: LoadedModel, profile: ModelProfile, pool: PoolSize, level: int) -> ModelInfo:
    source, program = model.source, model.program
    return ModelInfo(
        name=source.files.name,
        path=source.files.path,
        tokenizer_path=source.tokenizer_path,
        max_model_len=pool.max_model_len,
        vocab_size=program.vocab_size,
        eos_token_ids=tuple(t for t in source.eos_token_ids if t < program.vocab_size),
        dtype=source.dtype_name,
        device=str(source.device),
        num_blocks=pool.num_blocks,
        block_size=source.config.block_size,
        pool_tokens=pool.pool_tokens,
        blocks_per_request=profile.layout.blocks_for(pool.max_model_len),
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=program.kv_bytes_per_token,
        state_bytes_per_request=model.state_bytes,
        num_snapshots=pool.num_snapshots,
        is_default=source.files.is_default,
        opt_level=level,
        pass_reports=tuple(str(r) for r in program.reports),
        generation_defaults=source.sampling_defaults,
        pooling=None if source.pooling is None else source.pooling.describe(program.vector_size),
        extra_args=tuple(name for p in program.processors for name in p.arguments),
    )
