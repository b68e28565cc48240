"""Which form of a model's attention is captured: transformers' interface, or the spelled-out one.

Nearly every model calls its attention through the interface, where ours is registered. A model
that does not, or that takes masks apart which ours only mark, is captured in its plainest form
(`eager`), whose attention `passes/find_attention.py` then recognizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmc.compiler.build import BuiltModel, build
from llmc.compiler.capture import CapturedModel, capture
from llmc.compiler.layer_dedup.outline import capture_outlined
from llmc.errors import CheckpointError, CompileError
from llmc.passes.edit import calls
from llmc.passes.find_attention import SOFTMAX, is_scores


def build_any(config: Any, dtype: torch.dtype) -> BuiltModel:
    """The model on meta, wired to llmc's attention where its class lets that be chosen."""
    try:
        return build(config, dtype)
    except CheckpointError as reason:
        try:
            return build_plain(config, dtype)
        except CheckpointError:
            raise reason from reason.__cause__


def build_plain(config: Any, dtype: torch.dtype) -> BuiltModel:
    """The same in its plainest form."""
    return build(config, dtype, "eager")


def capture_any(
    built: BuiltModel,
    plain: Callable[[], BuiltModel],
    device: torch.device,
    *,
    outline: bool = True,
) -> CapturedModel:
    """`built`, or where that does not work what `plain` makes.

    Raise CompileError, with what the first was refused for, where neither works. `outline`: layers
    that repeat are captured once.
    """
    capture_one = capture_outlined if outline else capture
    try:
        captured = capture_one(built, device)
        if not _spells_attention_out(captured):
            return captured
        reason: CompileError = CompileError("the model computes attention that can't be paged")
    except CompileError as error:
        reason = error
    try:
        return capture_one(plain(), device)
    except (CompileError, CheckpointError):
        raise reason from reason.__cause__


def _spells_attention_out(captured: CapturedModel) -> bool:
    """Masks of ours are only marks, which attention of the model's own would not understand."""
    return any(is_scores(n) for n in calls(captured.graph.graph, *SOFTMAX))
