"""What a certificate is about, worked out from an EngineConfig without capturing anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from llmc.check.certificate import certificate_key, fingerprint
from llmc.compiler.cache import program_key
from llmc.config import EngineConfig
from llmc.passes.base import Pass
from llmc.passes.pipeline import PipelineOptions
from llmc.passes.user import digest, user_passes
from llmc.startup.load import held_forms, pipeline_options, tensors_of
from llmc.startup.model_files import ModelFiles, load_config, load_quantization, resolve_model
from llmc.startup.resolve import check_model_len, model_context, pick_device, pick_dtype, pick_level
from llmc.weights.quantized.quantization_config import StoredQuantization


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that decides which step will serve. `key` is "" where a pass has no digest."""

    config: EngineConfig
    files: ModelFiles
    hf_config: Any
    stored: StoredQuantization | None
    device: torch.device
    dtype: torch.dtype
    level: int
    model_len: int
    options: PipelineOptions
    extra: tuple[Pass, ...]
    weights: str
    key: str


def identify(config: EngineConfig) -> Identity:
    files = resolve_model(config)
    device = pick_device(config.device)
    hf_config, stored = load_config(files, config), load_quantization(files)
    check_model_len(config, hf_config)
    dtype = pick_dtype(config.dtype, hf_config)
    level = pick_level(config.opt_level, device)
    model_len = config.max_model_len or model_context(hf_config)
    held = held_forms(config, stored, tensors_of(files, stored, dtype))
    options = pipeline_options(config, device, model_len, held)
    extra = user_passes(config.extra_passes)
    dummy = config.load_format == "dummy"
    weights = f"made up from seed {config.seed}" if dummy else fingerprint(files.path)
    named = digest(extra)
    key = ""
    if named is not None:
        program = program_key(hf_config, dtype, device, options, config.passes, named)
        key = certificate_key(program, f"{weights} {stored}", device, level)
    return Identity(
        config=config,
        files=files,
        hf_config=hf_config,
        stored=stored,
        device=device,
        dtype=dtype,
        level=level,
        model_len=model_len,
        options=options,
        extra=extra,
        weights=weights,
        key=key,
    )
