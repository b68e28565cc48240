"""A model's name -> its program and weights: what start-up does for each model that is to run."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.config import EngineConfig
from llmc.startup.model_files import (
    ModelFiles,
    load_config,
    load_quantization,
    resolve_model,
    tokenizer_end,
)
from llmc.startup.resolve import (
    check_model_len,
    eos_token_ids,
    model_context,
    pick_dtype,
    unused_parts,
)
from llmc.weights.quantized.quantization_config import StoredQuantization

if TYPE_CHECKING:
    import torch

    from llmc.compiler.program import Program
    from llmc.passes.pipeline import PipelineOptions
    from llmc.weights.checkpoint import Readable
    from llmc.weights.quantized.kept_quantized import Held

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model lies and what its config says; nothing is compiled or read yet."""

    config: EngineConfig
    files: ModelFiles
    hf_config: Any
    device: torch.device
    dtype: torch.dtype
    stored: StoredQuantization | None  # None: the checkpoint's weights are plain
    open_tensors: Callable[[], Mapping[str, Readable]]  # the checkpoint's; looked into once

    @property
    def model_len(self) -> int:
        """The longest context that was asked for, else the model's own."""
        return self.config.max_model_len or model_context(self.hf_config)

    @property
    def vocab_size(self) -> int:
        """As config.json says; 0 where it does not."""
        text = getattr(self.hf_config, "get_text_config", lambda: self.hf_config)()
        return getattr(text, "vocab_size", None) or 0

    @property
    def tokenizer_path(self) -> Path | None:
        if self.config.tokenizer:
            return Path(self.config.tokenizer)
        return self.files.path if self.files.has_tokenizer else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The config's and the tokenizer's: fine-tunes may name a new end of turn there alone."""
        ids = eos_token_ids(self.hf_config, self.files)
        path = self.tokenizer_path
        end = tokenizer_end(path) if path else None
        return ids if end is None or end in ids else (*ids, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Ready to be given a cache."""

    source: ModelSource
    program: Program
    weights: dict[str, torch.Tensor]

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self._distinct)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.numel() * weight.dtype.itemsize for weight in self._distinct)

    @property
    def _distinct(self) -> list[torch.Tensor]:
        return list({id(weight): weight for weight in self.weights.values()}.values())


def find_model(config: EngineConfig, device: torch.device) -> ModelSource:
    """Raises CheckpointError where there is no such model, ConfigError where it is too short."""
    files = resolve_model(config)
    hf_config, stored = load_config(files, config), load_quantization(files)
    dtype = pick_dtype(config.dtype, hf_config, device)
    check_model_len(config, hf_config)
    if parts := unused_parts(hf_config):
        named = " and ".join(parts)
        log.info("%s is served as a text model: its %s parts are not loaded", files.name, named)
    return ModelSource(
        config=config,
        files=files,
        hf_config=hf_config,
        device=device,
        dtype=dtype,
        stored=stored,
        open_tensors=tensors_of(files, stored, dtype),
    )


def tensors_of(
    files: ModelFiles, stored: StoredQuantization | None, dtype: torch.dtype
) -> Callable[[], Mapping[str, Readable]]:
    """Opens the checkpoint, reads no weight; those stored quantized will be read in `dtype`."""

    @functools.cache
    def opened() -> Mapping[str, Readable]:
        from llmc.weights.tensors import open_tensors

        return open_tensors(files.path, stored, dtype)

    return opened


def held_forms(
    config: EngineConfig,
    stored: StoredQuantization | None,
    open_tensors: Callable[[], Mapping[str, Readable]],
) -> Held:
    """Weights that may stay in their stored form, which is exact."""
    if stored is None or config.quantization == "none" or config.load_format == "dummy":
        return ()
    from llmc.weights.quantized.kept_quantized import held_weights

    return held_weights(open_tensors())


def pipeline_options(
    config: EngineConfig, device: torch.device, model_len: int, held: Held = ()
) -> PipelineOptions:
    """What the passes are told of the engine that `config` asks for."""
    from llmc.kernels.cpu.compile import streams_plain_weights
    from llmc.kernels.prompt_table import head_dims, measured_on
    from llmc.passes.pipeline import PipelineOptions

    return PipelineOptions(
        block_size=config.block_size,
        max_positions=model_len,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=None if config.quantization == "none" else config.quantization,
        stored=held,
        device_type=device.type,
        streams_plain_weights=device.type == "cpu" and streams_plain_weights(),
        prompt_head_dims=head_dims(measured_on(device)),
    )


def compile_model(source: ModelSource) -> Program:
    """Captured and rewritten, or from the cache of an earlier start."""
    program = _compile(source, source.hf_config)
    if source.config.load_format == "dummy" or not program.parameters.aliases:
        return program
    untied = untied_config(source.hf_config, program.parameters.aliases, source.open_tensors())
    return program if untied is None else _compile(source, untied)


def untied_config(
    hf_config: Any, aliases: Mapping[str, tuple[str, ...]], tensors: Mapping[str, Readable]
) -> Any | None:
    """The config of a checkpoint that holds different values under the names of one weight.

    Such a one has two weights, whatever its config says of tied embeddings: so does transformers
    load it. None: what the config ties is one.
    """
    names = _stored_apart(tensors, aliases)
    if names is None:
        return None
    log.warning("config.json ties %s, but the checkpoint's differ: both are loaded", names)
    untied = copy.deepcopy(hf_config)
    for part in (untied, getattr(untied, "get_text_config", lambda: untied)()):
        part.tie_word_embeddings = False
    return untied


def _stored_apart(
    tensors: Mapping[str, Readable], aliases: Mapping[str, tuple[str, ...]]
) -> str | None:
    """Names of one weight under which a checkpoint holds several, as text."""
    for names in dict.fromkeys(aliases.values()):
        stored = [tensors[n] for n in names if n in tensors]
        if not all(stored[0].equals(other) for other in stored[1:]):
            return " and ".join(names)
    return None


def _compile(source: ModelSource, hf_config: Any) -> Program:
    from llmc.compiler.cache import ProgramCache
    from llmc.compiler.program import compile_program
    from llmc.kernels.cpu.build import cache_dir
    from llmc.passes.logits_processors import user_processors
    from llmc.passes.user import user_passes

    config = source.config
    held = held_forms(config, source.stored, source.open_tensors)
    return compile_program(
        hf_config,
        dtype=source.dtype,
        device=source.device,
        options=pipeline_options(config, source.device, source.model_len, held),
        switches=config.passes,
        extra=user_passes(config.extra_passes),
        processors=user_processors(config.logits_processors),
        cache=None if config.trust_remote_code else ProgramCache(cache_dir()),
    )


def load_model(source: ModelSource, program: Program) -> LoadedModel:
    """Read its weights, or make them up."""
    from llmc.compiler.program import load_weights, open_weights
    from llmc.weights.load import DummyWeights, WeightSource
    from llmc.weights.quantized.kept_quantized import tell_widened

    weights: WeightSource
    if source.config.load_format == "dummy":
        weights = DummyWeights(source.config.seed)
    else:
        tensors = source.open_tensors()
        if source.stored is not None and source.config.quantization is None:
            tell_widened(tensors, (role for _, role in program.weight_inputs()))
        weights = open_weights(program, tensors)
    return LoadedModel(source=source, program=program, weights=load_weights(program, weights))
