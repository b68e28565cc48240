"""Rotary embeddings with different frequencies for long and short sequences, as tables of both.

transformers chooses the frequencies of `longrope` by the number of tokens, and recomputes all keys
once a sequence exceeds the length that the model was trained on. In a batched step, each request is
a short or a long sequence by itself. A token of a long one has its index plus `long_context_from`
as its position, so that its row is found after those of short sequences:

    rows [0, long_context_from)   short sequences, which have no later position
    rows from there on         long sequences, from position 0

LongRoPE: arXiv 2402.13753.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmc.errors import CheckpointError, reason_of

_KIND = "longrope"
_PARTS = {1: ("polar",), 2: ("cos", "sin")}


def long_context_from(text_config: Any) -> int | None:
    """The number of tokens beyond which a sequence is long; None if the model has no such limit."""
    key = "original_max_position_embeddings"
    found = set()
    for rope in _parameters(text_config):
        trained = rope.get(key)
        if rope is text_config.rope_parameters:  # the model's code then prefers the config's field
            trained = getattr(text_config, key, None) or trained
        if rope.get("rope_type") == _KIND and trained:
            found.add(int(trained))
    if len(found) > 1:
        raise CheckpointError(
            "its layers have different original_max_position_embeddings "
            f"({', '.join(map(str, sorted(found)))}); llmc only supports models with a single one"
        )
    return found.pop() if found else None


def extended_context(text_config: Any, stated: int) -> int:
    """The tokens for which YaRN (arXiv 2309.00071) extends a model: those that it was trained on,
    times the factor. Many configs have it without a new `stated` maximum. 0 without YaRN."""
    found = []
    for rope in _parameters(text_config):
        trained = rope.get("original_max_position_embeddings") or stated
        if rope.get("rope_type") == "yarn":
            found.append(int(trained * float(rope.get("factor") or 1)))
    return min(found, default=0)


def use_tables(module: nn.Module, buffers: dict[str, Tensor], context: int) -> bool:
    """Replace `module`'s rotary embeddings that distinguish long and short sequences with tables.

    `module` is on meta, and `buffers` has the values of its buffers by name. Sequences have up to
    `context` tokens. -> whether there are tables. Raises CheckpointError if such an embedding can't
    be computed separately.
    """
    found = False
    for name, rotary in list(module.named_modules()):
        kinds: Any = getattr(rotary, "rope_type", None)
        layer_types = list(kinds) if isinstance(kinds, dict) else [None]
        if _KIND not in (kinds.values() if isinstance(kinds, dict) else [kinds]):
            continue
        config: Any = rotary.config
        trained = long_context_from(config)
        if trained is None:
            continue
        try:
            with torch.device("cpu"):  # all of the module's tensors are on meta, even private ones
                real = type(rotary)(config=config)
            values = {kind: _tables(real, kind, trained, context) for kind in layer_types}
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as e:
            raise CheckpointError(
                f"the rotary embedding {type(rotary).__name__} ({_KIND}) can't be computed "
                f"separately: {reason_of(e)}"
            ) from e
        for own in dict(rotary.named_buffers()):
            buffers.pop(f"{name}.{own}", None)
        tables = RotaryTables(values)
        for own, value in tables.named_buffers():
            buffers[f"{name}.{own}"] = value
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, tables.to("meta"))
        found = True
    return found


class RotaryTables(nn.Module):
    """(cos, sin) [1, T, D] for position_ids [1, T], from tables [rows, D] float32; for models that
    rotate complex numbers, complex64 [1, T, D / 2] instead.

    position_ids [axes, 1, T] are those of text, equal on every axis (startup/verify_images.py).
    """

    def __init__(self, tables: dict[str | None, tuple[Tensor, ...]]) -> None:
        super().__init__()
        for kind, parts in tables.items():
            for part, values in zip(_PARTS[len(parts)], parts, strict=True):
                self.register_buffer(_name(part, kind), values, persistent=False)

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
        if hasattr(self, _name("polar", layer_type)):
            numbers = F.embedding(position_ids, getattr(self, _name("polar", layer_type)))
            return torch.view_as_complex(numbers.unflatten(-1, (-1, 2)))
        cos = F.embedding(position_ids, getattr(self, _name("cos", layer_type)))
        sin = F.embedding(position_ids, getattr(self, _name("sin", layer_type)))
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def _name(part: str, layer_type: str | None) -> str:
    return part if layer_type is None else f"{layer_type}_{part}"


def _tables(
    rotary: nn.Module, layer_type: str | None, trained: int, context: int
) -> tuple[Tensor, ...]:
    """Results of the model's own code for the longest short sequence, then for the longest one."""
    given = {} if layer_type is None else {"layer_type": layer_type}
    lengths = [min(trained, context)] + ([context] if context > trained else [])
    x = torch.empty(1, 1, 1)
    texts: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        for length in lengths:
            found = rotary(x, position_ids=_positions(rotary, layer_type, length), **given)
            if isinstance(found, Tensor):
                found = (torch.view_as_real(found).flatten(-2),)
            texts.append(tuple(part[0].float() for part in found))
    return tuple(torch.cat(parts) for parts in zip(*texts, strict=True))


def _positions(rotary: nn.Module, layer_type: str | None, length: int) -> Tensor:
    """Those of a text [1, T], or [axes, 1, T] where the frequencies are shared out among axes;
    older transformers do not expand [1, T] themselves."""
    sections: Any = getattr(rotary, "mrope_section", None)
    if isinstance(sections, dict):
        sections = sections.get(layer_type)
    positions = torch.arange(length)[None]
    return positions.expand(len(sections), 1, length) if sections else positions


def _parameters(text_config: Any) -> Iterator[dict[str, Any]]:
    """One mapping for the model, or one for every type of layer."""
    found = getattr(text_config, "rope_parameters", None)
    if not isinstance(found, dict):
        return
    for rope in (found, *found.values()):
        if isinstance(rope, dict) and "rope_type" in rope:
            yield rope
