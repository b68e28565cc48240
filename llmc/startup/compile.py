"""ModelSource -> Program -> weights: build, capture, rewrite (or the cache), then load.

`serve`, `check` and `inspect` all use `rewrite_options`, and the first two use `build_as_stored`.
transformers and Dynamo are imported only if a model has to be captured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from llmc.compiler.cache import ProgramCache, config_digest, program_key
from llmc.compiler.program import (
    NONE_GIVEN,
    Program,
    RewriteOptions,
    load_weights,
    open_weights,
    rewrite,
)
from llmc.errors import CompileError
from llmc.kernels.cpu import levels
from llmc.passes.inputs import WeightInput
from llmc.passes.logits_processors import user_processors
from llmc.passes.options import PipelineOptions, Where
from llmc.passes.user import user_passes
from llmc.pooling import Head, Method
from llmc.runner import kv_cache
from llmc.startup.resolve import ModelSource
from llmc.weights.checkpoint import Readable
from llmc.weights.load import CheckpointWeights, DummyWeights, WeightSource, check_tables
from llmc.weights.quantized.kept_quantized import (
    KeptWeights,
    kept_parameters,
    kept_weights,
    log_dequantized,
)
from llmc.weights.stacked_experts import parts_of

if TYPE_CHECKING:
    from llmc.compiler.build import BuiltModel
    from llmc.weights.parameters import Parameters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledModel:
    """A program, and the source of its weights."""

    source: ModelSource
    program: Program
    key: str  # of the program in the cache; "" if it must not be cached
    built: BuiltModel | None  # None: the program is from the cache


def rewrite_options(source: ModelSource, kept: KeptWeights | None = None) -> RewriteOptions:
    """The passes' options for the engine that the source's config describes.

    `kept` are the weights that keep their stored quantization; None: read it from the checkpoint.
    """
    config, device = source.config, source.device
    return RewriteOptions(
        pipeline=PipelineOptions(
            block_size=config.block_size,
            max_positions=source.model_len,
            long_context_from=source.long_context_from or 0,
            kv_cache_dtype=source.kv_cache_dtype,
            quantization=None if config.quantization == "none" else config.quantization,
            kept=_kept(source) if kept is None else kept,
            device_type=device.type,
            activation_bits=activation_bits(source),
            float8_activations=config.activation_bits == 8,
            max_loras=config.max_loras if config.enable_lora else 0,
            max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
            max_lora_expert_rank=config.max_lora_expert_rank if config.enable_lora else 0,
            pooling=_method(source),
            encoder=source.head.encoder,
            tensor_parallel_size=config.tensor_parallel_size,
            taps=source.taps,
            draft_head=source.draft_head,
        ),
        switches=config.passes,
        extra=user_passes(config.extra_passes),
        processors=user_processors(config.logits_processors),
        head=source.head,
    )


def _method(source: ModelSource) -> Method | None:
    return None if source.pooling is None else source.pooling.method


def activation_bits(source: ModelSource) -> int | None:
    """Bits that inputs of integer weights are rounded to; None: they are not rounded. Integer
    products are faster on x86, except where the CPU has bfloat16 products."""
    if source.device.type != "cpu" or not levels.multiplies_integers():
        return None
    if source.dtype == torch.bfloat16 and levels.multiplies_bfloat16():
        return None
    bits = source.config.activation_bits
    return None if bits == 32 else bits


def _kept(source: ModelSource) -> KeptWeights:
    """Weights that can keep their stored quantized form, which is exact."""
    if source.stored is None or source.config.quantization == "none" or source.is_dummy:
        return ()
    return kept_weights(source.open_tensors())


def for_parameters(
    options: RewriteOptions, source: ModelSource, built: BuiltModel
) -> RewriteOptions:
    """The options with `kept` by the model's parameter names: experts that are stored one by one
    are one parameter."""
    if not options.pipeline.kept:
        return options
    kept = kept_parameters(built.module, source.open_tensors())
    return replace(options, pipeline=replace(options.pipeline, kept=kept))


def compile_model(
    source: ModelSource,
    cache: ProgramCache,
    head: Head | None = None,
    whole_images: Where = "none",
) -> CompiledModel:
    """Load the program from the cache, or build, capture and rewrite the model. Reads no weights.

    `head`: what to capture, if it differs from what the source is served for. Raises CompileError
    if the model can't be served. The cache is only read: see `keep`.
    """
    options = rewrite_options(source)
    if head is not None:
        pipeline = replace(options.pipeline, whole_images=whole_images)
        options = replace(options, head=head, pipeline=pipeline)
    options.check()
    found = _find(source, source.facts.digest, options, cache)
    if found is not None:
        parameters = found.program.parameters
        alike = _alike(source, parameters)
        if alike.keys() <= parameters.shapes.keys() and not _apart(alike, parameters):
            return found
    built = build_as_stored(source, options.head)  # also if the checkpoint's names differ
    digest = config_digest(built.source_config)
    if built.apart:
        digest = f"{digest} {' '.join(built.apart)}"
        found = _find(source, digest, options, cache)
    if found is not None:
        return replace(found, built=built)
    from llmc.compiler.attention_fallback import capture_model

    captured = capture_model(built, source.device, outline=options.outline)
    program = rewrite(captured, for_parameters(options, source, built))
    if not (program.caches or program.states or options.head.encoder):
        raise CompileError(
            "no attention and no recurrence was found in the model's graph, so its output would "
            "depend on the newest token only"
        )
    key = _key(source, digest, options)
    return CompiledModel(source=source, program=program, key=key, built=built)


def keep(model: CompiledModel, cache: ProgramCache) -> None:
    """Save a program for the next start. Call this once the program is verified."""
    if model.key and not model.program.from_cache:
        cache.save(model.key, model.program)


def _key(source: ModelSource, digest: str, options: RewriteOptions) -> str:
    if source.config.trust_remote_code:  # the key does not cover that code
        return ""
    return program_key(digest, source.dtype, source.device, options)


def _find(
    source: ModelSource, digest: str, options: RewriteOptions, cache: ProgramCache
) -> CompiledModel | None:
    key = _key(source, digest, options)
    program = cache.load(key, source.device) if key else None
    if program is None:
        return None
    program = replace(program, processors=options.processors)
    return CompiledModel(source=source, program=program, key=key, built=None)


def build_as_stored(source: ModelSource, head: Head | None = None) -> BuiltModel:
    """Build the model on the meta device. Weights that the config ties, but that have different
    values in the checkpoint, are separate parameters, as transformers loads them."""
    from llmc.weights.assignment import Assignment
    from llmc.weights.parameters import describe_parameters

    built = build_source(source, head)
    parameters = describe_parameters(built.module)
    alike = _alike(source, parameters)
    apart = _apart(Assignment(built.module, alike).direct, parameters) if alike else ()
    if not apart:
        return built
    log.warning(
        "config.json ties %s to another weight, but they differ in the checkpoint; loading both",
        ", ".join(apart),
    )
    return build_source(source, head, apart)


def build_source(
    source: ModelSource, head: Head | None = None, apart: Sequence[str] = ()
) -> BuiltModel:
    """Build the model on the meta device, with the ties that its config states, except `apart`."""
    from llmc.compiler.attention_fallback import build_model

    return build_model(
        source.load_hf_config(),
        source.dtype,
        head or source.head,
        source.model_len,
        apart,
        source.config.trust_remote_code,
    )


def _alike(source: ModelSource, parameters: Parameters) -> dict[str, Readable]:
    """The checkpoint's tensors that have the shape of a tied weight, by name."""
    if source.is_dummy or not parameters.aliases:
        return {}
    shapes = {parameters.shapes[name] for name in parameters.aliases}
    return {name: t for name, t in source.open_tensors().items() if tuple(t.shape) in shapes}


def _apart(tensors: Mapping[str, Readable], parameters: Parameters) -> tuple[str, ...]:
    """The names of tied weights whose stored values differ from those of the first name."""
    apart = []
    for names in dict.fromkeys(parameters.aliases.values()):
        first, *others = [n for n in names if n in tensors] or [""]
        apart += [name for name in others if not tensors[first].equals(tensors[name])]
    return tuple(apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A program with its weights loaded, ready to be bound to a cache."""

    source: ModelSource
    program: Program
    weights: dict[str, torch.Tensor]

    @property
    def num_parameters(self) -> int:
        """Number of parameters. Quantized weights count in full, tied ones once."""
        shapes, aliases = self.program.parameters.shapes, self.program.parameters.aliases
        used = {part for _, role in self.program.weight_inputs() for part in role.parts}
        first = {min(aliases.get(name, (name,))) for name in used}
        return sum(math.prod(shapes[name]) for name in first)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.numel() * weight.dtype.itemsize for weight in self._distinct)

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state per request; 0 for a model with attention only."""
        return kv_cache.state_bytes(self.program.states)

    @property
    def _distinct(self) -> list[torch.Tensor]:
        return list({id(weight): weight for weight in self.weights.values()}.values())


def load_model(
    model: CompiledModel, rank: int = 0, given: Mapping[WeightInput, torch.Tensor] = NONE_GIVEN
) -> LoadedModel:
    """Load the weights, or this rank's shards in a tensor-parallel engine. Those that are `given`
    are not read.

    Raises CheckpointError if a weight is missing in the checkpoint or has another shape.
    """
    weights = load_weights(model.program, open_source(model, given), rank, given)
    return LoadedModel(source=model.source, program=model.program, weights=weights)


def weights_of(source: ModelSource, module: nn.Module) -> WeightSource:
    """Any parameter of `module` from the checkpoint, or generated."""
    if source.is_dummy:
        return DummyWeights(source.config.seed, parts_of(module))
    return CheckpointWeights(module, source.open_tensors())


def open_source(
    model: CompiledModel, given: Mapping[WeightInput, torch.Tensor] = NONE_GIVEN
) -> WeightSource:
    """The source that the program's weights are read from, or generated by."""
    source, program = model.source, model.program

    def make_module() -> nn.Module:
        return (model.built or build_as_stored(source)).module

    if source.is_dummy:
        return DummyWeights(source.config.seed)
    tensors = source.open_tensors()
    opened = open_weights(program, tensors, make_module, given)
    check_tables(opened, program.parameters.tables)
    if source.stored is not None and source.config.quantization is None:
        roles = (role for _, role in program.weight_inputs())
        kept = {p for r in roles if r.quantized and r.quantized.kept for p in r.parts}
        log_dequantized(tensors, (t for name in kept for t in opened.stored(name)))
    return opened
