"""Compiles a program directly from a model's config, without a checkpoint or an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmc.compiler import attention_fallback
from llmc.compiler.program import Program, RewriteOptions, rewrite
from llmc.passes.options import PipelineOptions

CPU = torch.device("cpu")


def compile_config(
    config: Any,
    options: PipelineOptions,
    *,
    dtype: torch.dtype = torch.float32,
    switches: Mapping[str, bool] | None = None,
) -> Program:
    built = attention_fallback.build_model(config, dtype)
    captured = attention_fallback.capture_model(built, CPU)
    return rewrite(captured, RewriteOptions(pipeline=options, switches=switches or {}))
