"""EngineConfig -> a running EngineCore: every phase of start-up, timed, in one place."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.errors import ConfigError
from llmc.model_files import ModelFiles, generation_defaults, load_config, resolve_model

if TYPE_CHECKING:
    import torch

    from llmc.compiler.program import Program
    from llmc.compiler.upgrade import Upgrade
    from llmc.runner.model_runner import ModelRunner

# Activations grow with tokens, so a short step tells, and starts faster.
_PROFILE_TOKENS_CPU = 256
_PROFILE_TOKENS_REFERENCE = 16  # on the references, which are slow
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


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


class _Clock:
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
    clock = _Clock(on_phase)
    with clock.phase("read config") as detail:
        files = resolve_model(config)

        device = pick_device(config.device)
        hf_config = load_config(files, config)
        dtype = pick_dtype(config.dtype, hf_config, device)
        detail += [files.name, str(dtype).removeprefix("torch."), str(device)]
    start_kernels(device)
    level = pick_level(config.opt_level, device)
    model_len = config.max_model_len or model_context(hf_config)
    _check_model_len(config, hf_config)
    with clock.phase("compile") as detail:
        program = _compile(config, hf_config, dtype, device, model_len)
        matched = sum(1 for r in program.reports if r.added or r.removed)
        detail += [f"{len(program.caches)} layers", f"{matched} passes matched", f"-O{level}"]
        if program.from_cache:
            detail.append("from cache")
    with clock.phase("load weights") as detail:
        weights = _load_weights(config, files, program)
        weight_bytes = sum({id(w): _num_bytes(w, n) for n, w in weights.items()}.values())
        count = sum({id(w): w.numel() for w in weights.values()}.values())
        detail += [f"{count / 1e6:.1f}M parameters", f"{weight_bytes / 2**20:.0f} MiB"]
    with clock.phase("size cache") as detail:
        sized = _size_and_bind(config, program, weights, model_len, device)
        detail += [
            f"{sized.num_blocks} blocks of {config.block_size} tokens",
            f"{sized.cache_bytes / 2**20:.0f} MiB",
            f"context {sized.max_model_len}",
        ]
        if not sized.kernels_built:
            detail.append("C++ kernels are still being built: slow until then")
    eos = eos_token_ids(hf_config, files)
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
        enable_prefix_caching=config.enable_prefix_caching,
        max_num_queued=config.max_num_queued,
    )
    info = ModelInfo(
        name=files.name,
        path=files.path,
        tokenizer_path=Path(config.tokenizer)
        if config.tokenizer
        else (files.path if files.has_tokenizer else None),
        max_model_len=sized.max_model_len,
        vocab_size=program.vocab_size,
        eos_token_ids=eos,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        num_blocks=sized.num_blocks,
        block_size=config.block_size,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=sized.bytes_per_token,
        is_builtin=files.is_builtin,
        opt_level=level,
        pass_reports=tuple(str(r) for r in program.reports),
        generation_defaults=_sampling_defaults(files),
    )
    upgrade = _start_upgrade(program, sized, level)
    return Started(
        engine=engine, runner=sized.runner, info=info, phases=clock.phases, upgrade=upgrade
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sized:
    runner: ModelRunner
    bound: dict[str, Any]  # the tensors of the step: weights, caches, constants
    kernels_built: bool  # False: the step runs on references while the C++ ops are built
    num_blocks: int
    max_model_len: int
    cache_bytes: int
    bytes_per_token: int


def pick_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no GPU; use --device cpu")
    return torch.device(name)


def pick_dtype(name: str, hf_config: Any, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's dtype; float32 where the CPU would emulate bfloat16."""
    import torch

    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    stored = getattr(hf_config, "dtype", None) or torch.float32
    if isinstance(stored, str):
        stored = getattr(torch, stored, torch.float32)
    if stored not in (torch.float32, torch.bfloat16, torch.float16):
        stored = torch.float32
    if device.type == "cpu" and stored != torch.float32:
        supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        return torch.bfloat16 if supported() else torch.float32
    return stored


def pick_level(level: int | None, device: torch.device) -> int:
    """The optimization level that will run; a level that this device has not falls back."""
    return 0 if level is None else level


def model_context(hf_config: Any) -> int:
    """Longest context that config.json states, 2048 where it states none."""
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2048


def _check_model_len(config: EngineConfig, hf_config: Any) -> None:
    limit = model_context(hf_config)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's context of {limit} tokens"
        )


def _compile(
    config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device, model_len: int
) -> Program:
    from llmc.compiler.cache import ProgramCache
    from llmc.compiler.program import compile_program
    from llmc.kernels.cpu.compile import streams_plain_weights
    from llmc.passes.pipeline import PipelineOptions

    options = PipelineOptions(
        block_size=config.block_size,
        max_positions=model_len,
        device_type=device.type,
        streams_plain_weights=device.type == "cpu" and streams_plain_weights(),
    )
    return compile_program(
        hf_config,
        dtype=dtype,
        device=device,
        options=options,
        switches=config.passes,
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


def _num_bytes(weight: torch.Tensor, name: str) -> int:
    return weight.numel() * weight.dtype.itemsize


def _size_and_bind(
    config: EngineConfig,
    program: Program,
    weights: dict[str, Any],
    model_len: int,
    device: torch.device,
) -> _Sized:
    """Profile a step on a cache just large enough, size the pool from what is left, and bind."""
    from llmc.compiler.lower import lower
    from llmc.compiler.program import bind, lowered
    from llmc.runner.kv_cache import allocate, bytes_per_token
    from llmc.runner.model_runner import ModelRunner
    from llmc.runner.rows import RowTables
    from llmc.runner.sizing import PeakMemory, free_bytes, size_pool
    from llmc.runner.verify import LENGTHS, verify_packing

    per_token = bytes_per_token(program.caches, program.dtype)
    built = _kernels_are_built(device)
    graph = lowered(program)

    def make(num_blocks: int, length: int, num_rows: int) -> tuple[ModelRunner, dict[str, Any]]:
        caches = allocate(
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
    return _Sized(
        runner=runner,
        bound=bound,
        kernels_built=built,
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
        cache_bytes=pool.cache_bytes,
        bytes_per_token=per_token,
    )


def cache_dir() -> Path:
    """Where compiled artifacts are kept: $LLMC_CACHE_DIR, else ~/.cache/llmc."""
    return Path(os.environ.get("LLMC_CACHE_DIR") or Path.home() / ".cache" / "llmc")


def start_kernels(device: torch.device) -> None:
    """Make the device's kernels known. On CPU a C++ compiler may have to build them first: it
    works in processes of its own while the model is captured, and nobody waits for it."""
    if device.type == "cpu":
        import llmc.kernels.cpu  # noqa: F401 - lists the C++ versions
        from llmc.kernels.cpu.build import start_build

        start_build()
    elif importlib.util.find_spec("triton") is not None:
        importlib.import_module("llmc.kernels.triton")


def _kernels_are_built(device: torch.device) -> bool:
    """Load the C++ ops if they are there; False while they are being built."""
    if device.type != "cpu":
        return True
    from llmc.kernels.cpu import build

    if not build.start_build().done:
        return False
    build.load()  # False where they can't be built: the references are all there is
    return True


def _start_upgrade(program: Program, sized: _Sized, level: int) -> Upgrade | None:
    """Exchange the step for better ones as they get ready: C++ ops, then Inductor's code."""
    from llmc.compiler.lower import StepFunction, lower
    from llmc.compiler.program import lowered
    from llmc.compiler.upgrade import Stage, Upgrade

    runner = sized.runner

    def with_kernels() -> StepFunction | None:
        from llmc.kernels.cpu.build import load

        return lower(lowered(program), sized.bound) if load() else None

    def compiled() -> StepFunction:
        from llmc.compiler.inductor import compile_step  # imports the whole compiler

        return compile_step(
            lowered(program),
            sized.bound,
            runner.rows.tables,
            level=level,
            cache_dir=cache_dir(),
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


def _profile_plan(tokens: int, block_size: int) -> Any:
    """One request that fills a whole prefill step."""
    from llmc.engine.plan import NewRow, RowWork, StepPlan
    from llmc.sampling_params import SamplingParams

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


def eos_token_ids(hf_config: Any, files: ModelFiles) -> tuple[int, ...]:
    """End tokens of generation_config.json, else of config.json."""
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    value = generation_defaults(files).get("eos_token_id")
    if value is None:
        value = getattr(hf_config, "eos_token_id", None)
    if value is None:
        value = getattr(text, "eos_token_id", None)
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)


def _sampling_defaults(files: ModelFiles) -> dict[str, float]:
    """Sampling parameters that the model's authors chose, where they are usable numbers."""
    stored = generation_defaults(files)
    if stored.get("do_sample") is False:
        return {"temperature": 0.0}
    return {
        name: stored[name]
        for name in _SAMPLING_DEFAULTS
        if isinstance(stored.get(name), int | float) and not isinstance(stored.get(name), bool)
    }
