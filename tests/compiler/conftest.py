"""One compiled program of one tiny model, shared by the files of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_config import compile_config
from tiny_models import load_reference, make_config, save_checkpoint
from torch import fx

from llmc.compiler.build import build
from llmc.compiler.capture import capture
from llmc.compiler.program import Program
from llmc.passes.options import PipelineOptions

OPTIONS = PipelineOptions(block_size=4, max_positions=128, device_type="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A graph before and after the passes, its checkpoint, and transformers' model of that."""

    captured: fx.GraphModule
    program: Program
    path: Path
    reference: Any


def compile_tiny(family: str, **changes: Any) -> Program:
    dtype = changes.get("dtype", torch.float32)
    return compile_config(make_config(family, **changes), OPTIONS, dtype=dtype)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    path = save_checkpoint("qwen3", tmp_path_factory.mktemp("dense"))
    captured = capture(build(make_config("qwen3"), torch.float32), torch.device("cpu"))
    return Compiled(
        captured=captured.graph,
        program=compile_tiny("qwen3"),
        path=path,
        reference=load_reference(path),
    )
