"""EngineConfig -> ModelSource: finds the files, reads their config, and fills in open options.

`check_paths` does not need torch, so that a wrong path is reported at once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.config import GRAPHS_LEVEL, EngineConfig
from llmc.errors import CheckpointError, ConfigError
from llmc.passes.user_names import check_user_code
from llmc.pooling import LM, DraftHead, Head
from llmc.startup.config_facts import ConfigFacts, FactsCache, describe, token_ids
from llmc.startup.config_overrides import check_config_overrides, warn_of_unknown
from llmc.startup.model_files import (
    ModelFiles,
    generation_defaults,
    load_config,
    load_quantization,
    locate,
    resolve_model,
    tokenizer_end,
)
from llmc.startup.pooling import Pooling, dense_names, find_pooling
from llmc.startup.recommended import check_override, recommended_sampling
from llmc.text.template_file import check_template_kwargs, read_template
from llmc.text.tokenizer import check_tokenizer_files
from llmc.text.tools.given_format import read_tool_format
from llmc.weights.quantized.quantization_config import GGUF, StoredQuantization

if TYPE_CHECKING:
    import torch

    from llmc.weights.checkpoint import Readable

log = logging.getLogger(__name__)

_DEFAULT_CONTEXT = 2048  # if neither the config nor the user says


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model's files and config; nothing is compiled and no weights are read yet."""

    config: EngineConfig
    files: ModelFiles
    facts: ConfigFacts
    device: torch.device
    dtype: torch.dtype
    stored: StoredQuantization | None  # None: the checkpoint's weights are not quantized
    pooling: Pooling | None  # None: it generates text
    taps: tuple[int, ...] | None = None  # layers whose inputs are kept for a draft head: tap_states
    draft_head: DraftHead | None = None  # set if this is a draft head, not a whole model
    load_hf_config: Callable[[], Any]  # imports transformers, once
    open_tensors: Callable[[], Mapping[str, Readable]]  # the checkpoint's; opened once

    @property
    def head(self) -> Head:
        """The output to capture of the model."""
        if self.draft_head is not None:
            return Head(draft_head=self.draft_head)
        return LM if self.pooling is None else self.pooling.head

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_cache_dtype(self) -> str:
        """A key of CACHE_DTYPES. `auto` is float16 where only a GGUF file's weights are the reason
        to compute in float32: reading the cache then takes half the time, and rounding keys and
        values costs 5e-7 nats per token (docs/gguf.md)."""
        name, config = self.config.kv_cache_dtype, self.config
        is_gguf = self.stored is not None and self.stored.method == GGUF.method
        chosen = config.dtype == "auto" and self.dtype_name == "float32"
        rounds = config.activation_bits < 32
        return "float16" if name == "auto" and is_gguf and chosen and rounds else name

    @property
    def model_len(self) -> int:
        """The maximum context length: as configured, else the model's own."""
        most = self.pooling.max_tokens if self.pooling is not None else None
        own = self.facts.context or _DEFAULT_CONTEXT
        return self.config.max_model_len or min(own, most or own)

    @property
    def long_context_from(self) -> int | None:
        """Sequences of more tokens use the model's long-context rotary factors. None if there are
        none, or if no sequence can be that long."""
        trained = self.facts.long_context_from
        return trained if trained is not None and trained < self.model_len else None

    @property
    def tokenizer_path(self) -> Path | None:
        if self.config.tokenizer:
            return Path(self.config.tokenizer)
        return self.files.path if self.files.has_tokenizer else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens from generation_config.json, else config.json; plus the tokenizer's.

        A fine-tuned model may have its new end-of-turn token in the tokenizer only.
        """
        stated = generation_defaults(self.files).get("eos_token_id")
        ids = self.facts.eos_token_ids if stated is None else token_ids(stated)
        path = self.tokenizer_path
        end = tokenizer_end(path) if path else None
        return ids if end is None or end in ids else (*ids, end)

    def sampling_defaults(self) -> dict[str, Any]:
        """Sampling parameters recommended by the model's authors, if they are usable, and by the
        user."""
        own = recommended_sampling(generation_defaults(self.files))
        return own | check_override(self.config.override_generation_config)

    def in_dtype(self, dtype: torch.dtype) -> ModelSource:
        """The same model, computed in another dtype."""
        tensors = functools.partial(_open_tensors, self.files, self.stored, dtype, self.pooling)
        return replace(self, dtype=dtype, open_tensors=functools.cache(tensors))

    @property
    def is_dummy(self) -> bool:
        """Whether weights are generated, without opening a checkpoint."""
        return self.config.load_format == "dummy"


def check_paths(config: EngineConfig) -> None:
    """Report a wrong path or name at once, without heavy imports or downloads.

    Raises CheckpointError, or ConfigError for a user's pass or logits processor, a chat template, a
    tool format, or a revision of a local model.
    """
    check_user_code(config.extra_passes, "pass")
    check_user_code(config.logits_processors, "class")
    if config.chat_template is not None:
        read_template(config.chat_template)
    check_template_kwargs(config.chat_template_kwargs)
    check_override(config.override_generation_config)
    check_config_overrides(config.hf_overrides)
    read_tool_format(config.tool_format)
    models = [replace(config, speculative_config=None)]
    if (drafting := config.speculative_config) is not None and drafting.model is not None:
        draft = replace(models[0], model=drafting.model, revision=drafting.revision)
        models.append(replace(draft, hf_overrides=None))
    for model in models:
        location = locate(model)
        if location is not None and model.revision is not None:
            raise ConfigError(
                f"revision {model.revision!r} is for models from the hub, but {location.name} is "
                f"read from {str(location.path)!r}; leave it out"
            )
        if location is not None and not location.is_gguf:
            load_quantization(location.files())  # reads config.json
    if config.tokenizer is not None:
        check_tokenizer_files(Path(config.tokenizer))


def resolve(
    config: EngineConfig,
    device: torch.device,
    *,
    files: ModelFiles | None = None,
    facts_cache: FactsCache | None = None,
) -> ModelSource:
    """Find a model and read its config. Raises CheckpointError if there is no such model,
    ConfigError if its context is too short.

    `files`: the model's files, if already known. The config is read with transformers, unless its
    facts are in `facts_cache`.
    """
    files = files or resolve_model(config)
    stored = load_quantization(files)
    load_hf_config = functools.cache(functools.partial(load_config, files, config))
    facts = facts_cache.load(files, config) if facts_cache is not None else None
    if facts is None:
        facts = describe(load_hf_config())
        if facts_cache is not None:
            facts_cache.save(files, config, facts, load_hf_config())
    warn_of_unknown(files.added_fields, facts.fields)
    _check_model_len(config, facts)
    pooling = find_pooling(config, files, facts)
    stated = facts.dtype or _dtype_of_integers(config, stored, device)
    if stated is None and config.dtype == "auto":
        stated = _dtype_of_weights(config, files)
    dtype = pick_dtype(config.dtype, stated)
    _check_cache_dtype(config.kv_cache_dtype, dtype)
    source = ModelSource(
        config=config,
        files=files,
        facts=facts,
        device=device,
        dtype=dtype,
        stored=stored,
        pooling=pooling,
        load_hf_config=load_hf_config,
        open_tensors=functools.cache(
            functools.partial(_open_tensors, files, stored, dtype, pooling)
        ),
    )
    if facts.is_encoder:  # a whole input is computed in one step
        most = max(config.max_num_batched_tokens, source.model_len)
        source = replace(source, config=replace(config, max_num_batched_tokens=most))
    return source


def _open_tensors(
    files: ModelFiles,
    stored: StoredQuantization | None,
    dtype: torch.dtype,
    pooling: Pooling | None,
) -> Mapping[str, Readable]:
    """Open the checkpoint without reading weights. Quantized ones will be read in `dtype`."""
    from llmc.weights.tensors import open_tensors

    found = open_tensors(files.path, stored, dtype)
    for name, (folder, there) in dense_names(pooling).items():
        tensors = open_tensors(folder, None, dtype)
        if there not in tensors:
            raise CheckpointError(f"{folder.name}/model.safetensors has no {there}")
        found[name] = tensors[there]
    return found


def _check_model_len(config: EngineConfig, facts: ConfigFacts) -> None:
    if config.max_model_len and facts.context and config.max_model_len > facts.context:
        why = ", within which its sparse indexer selects all (more is not supported yet)"
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's context of {facts.context} "
            f"tokens{why if facts.dense_context else ''}"
        )


def _check_cache_dtype(name: str, dtype: torch.dtype) -> None:
    from llmc.kernels.cache_dtype import CACHE_DTYPES, cache_dtypes

    wanted = CACHE_DTYPES[name]
    if wanted is not None and wanted not in cache_dtypes(dtype):
        known = " or ".join(dict.fromkeys((name, "float32")))
        own = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"kv_cache_dtype {name} is for models in {known}, not {own}; use auto, or give dtype "
            f"{name}, too"
        )


def pick_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was requested, but torch finds no GPU; use --device cpu")
    return torch.device(name)


def pick_dtype(name: str, stored: str | None) -> torch.dtype:
    """`auto` is the checkpoint's dtype, on every device."""
    import torch

    known = ("float32", "bfloat16", "float16")
    dtype: torch.dtype = getattr(torch, name if name != "auto" else str(stored), torch.float32)
    return dtype if str(dtype).removeprefix("torch.") in known else torch.float32


def _dtype_of_integers(
    config: EngineConfig, stored: StoredQuantization | None, device: torch.device
) -> str | None:
    """The dtype for a GGUF file: float32 on CPU if its weights stay quantized, since it is exact,
    as fast, and a 16-bit dtype would not make the weights smaller."""
    if stored is None or stored.method != GGUF.method:
        return None
    return "float32" if device.type == "cpu" and config.quantization != "none" else "bfloat16"


def _dtype_of_weights(config: EngineConfig, files: ModelFiles) -> str | None:
    """The dtype of a checkpoint whose config.json has none: that of its first floating-point weight
    by name, as in transformers. Files are not in that order: their widest dtype comes first."""
    import torch

    from llmc.weights.tensors import open_tensors

    if config.load_format == "dummy":
        return None
    try:
        tensors = open_tensors(files.path, None, torch.float32)
    except CheckpointError:  # raised again when weights are read; a bare config can be inspected
        return None
    dtypes = (tensors[name].dtype for name in sorted(tensors))
    wide = (dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1)
    return next((str(dtype).removeprefix("torch.") for dtype in wide), None)


def pick_level(level: int | None, device: torch.device) -> int:
    """The optimization level to run.

    On CPU, -O0 with packed ops is as fast as compiled code and starts at once (bench/results). On
    GPUs, few ops are left for Inductor to compile: on an H200 it gained nothing with one request,
    and lost 7 % with 32 (docs/gpu.md; `python -m bench.gpu --part ladder` compares the levels).
    """
    if level is not None:
        return level
    return GRAPHS_LEVEL if device.type == "cuda" else 0


def pick_async(wanted: bool | None, device: torch.device) -> bool:
    """Whether to plan steps ahead of results.

    On a GPU this hides the host's work. On CPU there is little to hide, planning uses the same
    cores, and every unforeseen stop wastes a row of a step.
    """
    return device.type == "cuda" if wanted is None else wanted
