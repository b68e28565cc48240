"""What modules of a model's own code only set in their first call, such as the length of a table.

Many rotary embeddings compute their tables for the model's context when they are constructed, and
again in the first call, for as many rows as it has tokens. Captured, that would be part of every
step. Here the first call is made for as many tokens as the table has rows. If the tables stay the
same, what it sets besides is kept, so that the code that is captured uses the table that there is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llmc.compiler.model_errors import MODEL_ERRORS

_LENGTH = "seq_len"  # the argument by which such modules are recognized
_PLAIN = (bool, int, float, str, type(None))


def make_first_calls(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Set the attributes of `module`'s modules on meta. `buffers`: values by name."""
    made: list[tuple[Any, Mapping[str, Tensor], dict[str, Any]]] = []  # for equal modules
    for name, child in module.named_modules():
        leaves = {leaf: buffers.get(f"{name}.{leaf}") for leaf in child._buffers}
        own = {leaf: value for leaf, value in leaves.items() if value is not None}
        if len(own) < len(leaves) or not _has_tables(child, own):
            continue
        key = type(child), _plain(child)
        changes = next((c for k, its, c in made if k == key and _are_equal(its, own)), None)
        if changes is None:
            changes = _changes(child, own)
            made.append((key, own, changes))
        for attribute, value in changes.items():
            setattr(child, attribute, value)


def _has_tables(child: nn.Module, own: Mapping[str, Tensor]) -> bool:
    if type(child).__module__.startswith(("torch.", "transformers.")):
        return False
    if len(list(child.children())) + len(list(child.parameters())) > 0:
        return False
    is_asked = _LENGTH in inspect.signature(child.forward).parameters
    return is_asked and any(value.dim() > 1 for value in own.values())


def _changes(child: nn.Module, own: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the first call sets; nothing if it also changes the tables."""
    before = _plain(child)
    copied = copy.deepcopy(child)
    for leaf, value in own.items():
        copied._buffers[leaf] = value.clone()
    table = max(own.values(), key=lambda value: value.dim())
    rows = max(table.shape[:-1])
    try:
        with torch.no_grad(), torch.device("cpu"):
            copied(torch.zeros(1, 1, 1, table.shape[-1], dtype=table.dtype), **{_LENGTH: rows})
    except MODEL_ERRORS:
        return {}
    if not _are_equal(own, {k: b for k, b in copied._buffers.items() if b is not None}):
        return {}
    return {k: v for k, v in _plain(copied).items() if k not in before or before[k] != v}


def _are_equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        value.dtype == others[k].dtype and torch.equal(value, others[k])
        for k, value in some.items()
    )


def _plain(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if isinstance(v, _PLAIN)}
