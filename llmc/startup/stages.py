"""The stages of a start after the import of torch: each takes the results of those before it.

A draft model, if there is one, goes through the same stages as its target. Lists have the target
first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from llmc.cache_dir import cache_dir
from llmc.compiler.cache import ProgramCache
from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.options import MAX_SCORED, EngineFeatures, EngineLimits
from llmc.engine.spec_decode.ngram import NgramSpeculation
from llmc.engine.spec_decode.speculation import Speculation
from llmc.errors import ConfigError, reason_of
from llmc.kernels.cpu.build import Build
from llmc.kernels.cpu.pages import release_memory
from llmc.kernels.cpu.threads import limit_threads
from llmc.model_info import ModelInfo
from llmc.runner.ranks import Ranks
from llmc.runner.row_states import RowStates
from llmc.speculative_config import SpeculativeConfig
from llmc.startup import draft_model
from llmc.startup.architecture_certificate import (
    ArchitectureCertificates,
    architecture_key,
    disable_faulty_passes,
)
from llmc.startup.background import (
    Upgrade,
    compile_in_background,
    kernels_are_built,
    start_kernels,
    wait_for_kernels,
)
from llmc.startup.bind import BoundModel, StepMode, bind_model, why_not_swapped
from llmc.startup.compile import CompiledModel, LoadedModel, compile_model, keep, load_model
from llmc.startup.config_facts import FactsCache
from llmc.startup.images import ImageModel, NoImages, load_images
from llmc.startup.model_files import Location
from llmc.startup.phase_clock import PhaseClock
from llmc.startup.profile import profile_model
from llmc.startup.resolve import ModelSource, pick_async, pick_device, pick_level, resolve
from llmc.startup.sizing import ModelProfile, PoolSize, check_weights, size_pools
from llmc.startup.tensor_parallel import RankProcesses, check_source, share_threads
from llmc.structured.begin import GrammarStarter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModels:
    """What the files besides the weights say, and this machine."""

    source: ModelSource
    draft_source: ModelSource | None
    device: torch.device
    level: int
    build: Build | None  # of the C++ ops
    programs: ProgramCache
    certificate_key: str
    disabled_passes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModels:
    """Compiled models with their weights."""

    compiled: Sequence[CompiledModel]
    models: Sequence[LoadedModel]
    max_in_flight: Sequence[int]  # steps, of each model
    ranks: Ranks | None
    images: ImageModel | NoImages
    drafting: SpeculativeConfig | None

    @property
    def target(self) -> LoadedModel:
        return self.models[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedEngine:
    """Models bound to their caches."""

    profile: ModelProfile  # of the target
    pool: PoolSize
    bound: Sequence[BoundModel]


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn running out of memory into a ConfigError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has too little memory for this model ({reason_of(error)}); use a smaller one "
            "or a quantization, set tensor_parallel_size to use several GPUs, lower "
            "max_num_batched_tokens or max_num_seqs, or end what else uses the GPU"
        ) from error
    except (MemoryError, RuntimeError) as error:  # RuntimeError: of torch's allocator for CPUs
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise ConfigError(
            "this process may not have as much memory as the model needs "
            f"({reason_of(error)}); use a smaller model or a quantization, lower "
            "kv_cache_memory or max_num_batched_tokens, or raise the limit (ulimit -v)"
        ) from error


def resolve_models(config: EngineConfig, location: Location, clock: PhaseClock) -> ResolvedModels:
    """Read the configs, and start to build the C++ ops meanwhile. Raises ConfigError."""
    device = pick_device(config.device)
    build = start_kernels(device)
    with clock.phase("read GGUF") if location.is_new else nullcontext():
        files = location.files()
    facts = FactsCache(cache_dir())
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
    return ResolvedModels(
        source=source,
        draft_source=draft_source,
        device=device,
        level=pick_level(config.opt_level, device),
        build=build,
        programs=ProgramCache(cache_dir()),
        certificate_key=certificate_key,
        disabled_passes=disabled,
    )


def limit_to_cores(resolved: ResolvedModels) -> None:
    """Set the number of threads, of which each of several engines on this machine gets a share."""
    config = resolved.source.config
    if resolved.device.type != "cpu":
        return
    limit_threads()
    if config.distributed_executor_backend != "ray":  # Ray assigns the cores
        share_threads(config.tensor_parallel_size * config.data_parallel_size)


def load_models(
    resolved: ResolvedModels, processes: RankProcesses | None, clock: PhaseClock
) -> LoadedModels:
    """Compile the models and read their weights. Raises CheckpointError or CompileError."""
    source, programs, device = resolved.source, resolved.programs, resolved.device
    if processes is not None:
        check_source(source)
    with clock.phase("compile") as detail:
        compiled = compile_model(source, programs)
        draft_model.check_width(resolved.draft_source, source, compiled.program)
        detail += _program_details(compiled, resolved.level)
        if processes is not None:
            processes.send(source, compiled.program)
    check_weights(device, source.config, compiled.program.weight_bytes)
    with clock.phase("load weights") as detail:
        kernels_are_built(resolved.build)  # if so, they repack GGUF files
        model = load_model(compiled)
        if device.type == "cpu":
            release_memory(())  # what the allocator keeps after quantizing would limit the cache
        detail += [
            f"{model.num_parameters / 1e6:.1f}M parameters",
            f"{model.weight_bytes / 2**20:.0f} MiB",
        ]
        ranks = None
        if processes is not None:
            ranks = processes.join(device)
            detail.append(f"on each of {ranks.size} ranks")
    images = _load_images(model, programs, clock)
    drafting = _speculation_config(model)
    all_compiled, models = [compiled], [model]
    in_flight = [2 if pick_async(source.config.async_scheduling, device) else 1]
    if drafting is not None and resolved.draft_source is not None:
        with clock.phase("draft model") as detail:
            all_compiled.append(compile_model(resolved.draft_source, programs))
            models.append(draft_model.load_draft(all_compiled[-1], compiled, model))
            in_flight.append(draft_model.draft_in_flight(drafting, device))
            name = resolved.draft_source.files.name
            detail += [name, f"{models[-1].weight_bytes / 2**20:.0f} MiB"]
    return LoadedModels(
        compiled=all_compiled,
        models=models,
        max_in_flight=in_flight,
        ranks=ranks,
        images=images,
        drafting=drafting,
    )


def size_engine(resolved: ResolvedModels, loaded: LoadedModels, clock: PhaseClock) -> SizedEngine:
    """Measure the memory of a step, and bind the models to caches that fill the rest."""
    build, images, model = resolved.build, loaded.images, loaded.target
    keeps_low_bits = any(c.program.keeps_low_bits for c in loaded.compiled)
    if build is not None and not build.done and keeps_low_bits:
        with clock.phase("build C++ ops"):
            wait_for_kernels(build)
    with clock.phase("profile"):
        built = kernels_are_built(build)
        modes = [
            StepMode(level=resolved.level, kernels_built=built, max_in_flight=n)
            for n in loaded.max_in_flight
        ]
        modes[0] = replace(modes[0], ranks=loaded.ranks)
        profiles = [
            profile_model(*each, resolved.programs)
            for each in zip(loaded.compiled, loaded.models, modes, strict=True)
        ]
        if isinstance(images, ImageModel):
            keep(images.compiled, resolved.programs)
    with clock.phase("size cache") as detail:
        if isinstance(images, ImageModel) and resolved.device.type == "cuda":
            beside = profiles[0].overhead_bytes + images.overhead_bytes
            profiles[0] = replace(profiles[0], overhead_bytes=beside)
        pool = _size_pool(resolved, loaded, profiles)
        bound: list[BoundModel] = []
        for one, profile, mode in zip(loaded.models, profiles, modes, strict=True):
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
        if build is not None and not built:
            detail.append(f"{build.progress}: slow until then")
    return SizedEngine(profile=profiles[0], pool=pool, bound=bound)


def make_engine(loaded: LoadedModels, sized: SizedEngine, info: ModelInfo) -> EngineCore:
    model, pool, bound, images = loaded.target, sized.pool, sized.bound[0], loaded.images
    config, program = model.source.config, model.program
    is_encoder = model.source.facts.is_encoder
    has_states = bool(model.state_bytes) or is_encoder  # blocks do not hold all of a prompt's past
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
            eos_token_ids=info.eos_token_ids,
            seed=config.seed,
            enable_prefix_caching=_caches_prefixes(model)
            and bool(pool.num_snapshots or not has_states),
            share_prompts=not has_states,
            num_snapshots=pool.num_snapshots,
            swap_config=bound.swap_config,
            scheduling_policy=config.scheduling_policy,
            speculation=_speculation(loaded, sized),
            windows=sized.profile.layout.windows,
            long_context_from=model.source.long_context_from,
            grammars=GrammarStarter(
                model.source.tokenizer_path,
                vocab_size=program.vocab_size,
                eos_token_ids=info.eos_token_ids,
            ),
            adapters=bound.adapters,
            whole_images=isinstance(images, ImageModel) and images.info.most_rows > 0,
            whole_prompts=is_encoder,
            one_prompt=program.single_sequence,
            row_states=RowStates(program.processors, program.vocab_size),
        ),
    )


def describe(resolved: ResolvedModels, loaded: LoadedModels, sized: SizedEngine) -> ModelInfo:
    model, pool, images = loaded.target, sized.pool, loaded.images
    source, program = model.source, model.program
    # A checkpoint may name an end token beyond its logits. It can't be sampled, and must not be
    # used as an index.
    eos = tuple(t for t in source.eos_token_ids if 0 <= t < program.vocab_size)
    return ModelInfo(
        name=source.files.name,
        path=source.files.path,
        tokenizer_path=source.tokenizer_path,
        max_model_len=pool.max_model_len,
        vocab_size=program.vocab_size,
        eos_token_ids=eos,
        dtype=source.dtype_name,
        device=str(source.device),
        num_blocks=pool.num_blocks,
        block_size=source.config.block_size,
        pool_tokens=pool.pool_tokens,
        blocks_per_request=sized.profile.layout.blocks_for(pool.max_model_len),
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=program.kv_bytes_per_token,
        state_bytes_per_request=model.state_bytes,
        num_snapshots=pool.num_snapshots,
        is_default=source.files.is_default,
        opt_level=resolved.level,
        pass_reports=tuple(str(r) for r in program.reports),
        generation_defaults=source.sampling_defaults(),
        pooling=None if source.pooling is None else source.pooling.describe(program.vector_size),
        extra_args=tuple(name for p in program.processors for name in p.arguments),
        certificate_key=resolved.certificate_key,
        disabled_passes=resolved.disabled_passes,
        images=images.info if isinstance(images, ImageModel) else None,
        image_refusal=images.reason if isinstance(images, NoImages) else "",
    )


def start_upgrade(resolved: ResolvedModels, sized: SizedEngine) -> Upgrade | None:
    """Compile faster steps in the background, if there are any."""
    return compile_in_background(sized.bound, resolved.level, cache_dir())


def _program_details(compiled: CompiledModel, level: int) -> list[str]:
    program = compiled.program
    details = [f"{program.num_layers} layers"] if program.num_layers else []  # with a KV cache
    details += [program.capture_note] if program.capture_note else []
    matched = sum(1 for report in program.reports if report.changed)
    details += [f"{matched} passes matched", f"-O{level}"]
    return details + (["from cache"] if program.from_cache else [])


def _load_images(
    model: LoadedModel, programs: ProgramCache, clock: PhaseClock
) -> ImageModel | NoImages:
    if not model.source.facts.unused_parts:
        return NoImages(reason="it reads text only")
    with clock.phase("images") as detail:
        images = load_images(model, programs)
        detail.append("refused" if isinstance(images, NoImages) else "read")
    return images


def _size_pool(
    resolved: ResolvedModels, loaded: LoadedModels, profiles: Sequence[ModelProfile]
) -> PoolSize:
    source, model = resolved.source, loaded.target
    if source.config.enable_prefix_caching and (why := _reads_all_of_a_text(model)):
        log.info("prefix caching is off: %s", why)
    state_bytes = model.state_bytes if _caches_prefixes(model) else 0
    pool = size_pools(
        source.config, resolved.device, profiles, source.model_len, loaded.ranks, state_bytes
    )
    if state_bytes and not pool.num_snapshots:
        log.info(
            "prefix caching is off: one state of this model's recurrent layers takes %.0f MiB, "
            "more than an eighth of the cache memory; raise kv_cache_memory (--kv-cache-memory)",
            state_bytes / 2**20,
        )
    return pool


def _speculation(loaded: LoadedModels, sized: SizedEngine) -> Speculation | None:
    if loaded.drafting is None:
        return None
    if len(loaded.models) == 1:
        return NgramSpeculation(loaded.drafting)
    runner = sized.bound[1].runner
    target, draft = loaded.models
    return draft_model.speculate(loaded.drafting, draft, runner, target, sized.pool)


def _speculation_config(model: LoadedModel) -> SpeculativeConfig | None:
    """None, with a log line, if the model's state can't be rolled back."""
    config = model.source.config
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
    elif model.source.config.swap_space and (why := why_not_swapped(model)):
        details.append(f"no swap, since {why}")
    return details
