"""Build and capture a model through transformers' attention interface, or with eager attention.

Nearly every model calls its attention through the interface, where ours is registered. A model that
does not, or that operates on the masks, which are only markers here, is captured with its `eager`
attention, which `passes/find_attention.py` then recognizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from llmc.compiler import interface
from llmc.compiler.build import BuiltModel, build
from llmc.compiler.capture import capture
from llmc.compiler.layer_dedup.outline import capture_outlined
from llmc.compiler.program import CapturedModel
from llmc.errors import CheckpointError, CompileError
from llmc.passes.find_attention import spells_attention
from llmc.passes.layers import layer_list
from llmc.pooling import LM, Head

_EAGER = "eager"


def build_model(
    config: Any,
    dtype: torch.dtype,
    head: Head = LM,
    context: int | None = None,
    apart: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> BuiltModel:
    """Build the model on meta, with llmc's attention if its class supports choosing one."""
    others = head, context, apart, trust_remote_code
    try:
        return build(config, dtype, interface.NAME, *others)
    except CheckpointError as reason:
        try:
            return build(config, dtype, _EAGER, *others)
        except CheckpointError:
            raise reason from reason.__cause__


def capture_model(
    built: BuiltModel, device: torch.device, *, outline: bool = True
) -> CapturedModel:
    """Capture `built` or, if that fails, the same model with its eager attention.

    Raises CompileError with the first failure's reason if neither works. `outline`: capture
    repeated layers only once.
    """
    capture_one = capture_outlined if outline else capture
    try:
        captured = capture_one(built, device)
        # our masks are only markers, which a model's own attention would misinterpret
        if not spells_attention(captured.graph):
            return captured
        reason = CompileError("the model computes attention that can't be paged")
    except CompileError as error:
        reason = error
    try:
        captured = capture_one(_build_eager(built), device)
    except (CompileError, CheckpointError):
        raise reason from reason.__cause__
    if not spells_attention(captured.graph):
        raise reason from reason.__cause__
    return captured


def _build_eager(built: BuiltModel) -> BuiltModel:
    """The same model with eager attention, with the same number of layers (`inspect` keeps fewer)
    and the same values of buffers (`llmc check` rounds them)."""
    eager = build(
        built.source_config,
        built.dtype,
        _EAGER,
        built.head,
        built.context,
        built.apart,
        built.trust_remote_code,
    )
    path, _ = layer_list(name for name, _ in built.module.named_parameters())
    kept, layers = built.module.get_submodule(path), eager.module.get_submodule(path)
    if isinstance(kept, nn.ModuleList) and isinstance(layers, nn.ModuleList):
        del layers[len(kept) :]
    same = {name: built.buffers[name] for name in eager.buffers.keys() & built.buffers.keys()}
    return replace(eager, buffers={**eager.buffers, **same})
