"""Captures only enough decoder layers to include every kind: the others are copies of these.

Two layers are of the same kind if their modules have the same structure, shapes and settings, and
the config has the same values for both. The model keeps its first layers, up to one of every kind,
so that everything indexed by layer number stays right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from llmc.passes.layers import layer_list

Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """`stand_in[i]` is the captured layer that layer i is a copy of."""

    path: str
    num_layers: int
    num_captured: int
    stand_in: tuple[int, ...]

    def copies(self, layer: int) -> int:
        """How many layers of the whole model a captured layer represents; 1 outside the layers."""
        return self.stand_in.count(layer) if 0 <= layer < self.num_captured else 1

    @property
    def is_whole(self) -> bool:
        return self.num_captured == self.num_layers


def shorten(module: nn.Module, config: Any, *, keep_all: bool = False) -> Shortened:
    """Cut the module's list of layers, in place."""
    path, count = layer_list(name for name, _ in module.named_parameters())
    layers = module.get_submodule(path) if count else None
    if keep_all or not isinstance(layers, nn.ModuleList) or len(layers) != count:
        return Shortened(
            path=path, num_layers=count, num_captured=count, stand_in=tuple(range(count))
        )
    kinds = layer_kinds(layers, config)
    kept = one_of_each(kinds)
    last = {kind: i for i, kind in enumerate(kinds[:kept])}  # preferably not the first layer
    del layers[kept:]
    stand_in = tuple(i if i < kept else last[kind] for i, kind in enumerate(kinds))
    return Shortened(path=path, num_layers=count, num_captured=kept, stand_in=stand_in)


def layer_kinds(layers: nn.ModuleList, config: Any) -> list[Kind]:
    """The kind of each layer. Settings that differ in every layer are layer numbers: ignored."""
    count = len(layers)
    found = [_settings(layer) for layer in layers]
    numbering = {
        key
        for key in (found[0] if count > 2 else ())
        if len({settings.get(key) for settings in found}) == count
    }
    return [
        _kind(layer, config, i, count, {k: v for k, v in settings.items() if k not in numbering})
        for i, (layer, settings) in enumerate(zip(layers, found, strict=True))
    ]


def one_of_each(kinds: Sequence[Kind]) -> int:
    """How many first layers include every kind, plus one, so that a layer follows another."""
    wanted = set(kinds)
    seen: set[Kind] = set()
    for i, kind in enumerate(kinds):
        seen.add(kind)
        if seen == wanted:
            return min(i + 2, len(kinds))
    return len(kinds)


def _settings(layer: nn.Module) -> dict[tuple[str, str], object]:
    """(module, attribute) -> value, for the plain attributes of all modules."""
    return {
        (name, key): value
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str) and "idx" not in key
    }


def _kind(
    layer: nn.Module,
    config: Any,
    index: int,
    count: int,
    settings: Mapping[tuple[str, str], object],
) -> Kind:
    parts: list[object] = [tuple(settings.items())]
    for name, module in layer.named_modules():
        shapes = [(n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False)]
        shapes += [(n, tuple(b.shape)) for n, b in module.named_buffers(recurse=False)]
        parts.append((name, type(module).__name__, tuple(shapes)))
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    listed = [
        (key, value[index])
        for key, value in sorted(vars(text).items())
        if isinstance(value, list | tuple)
        and len(value) == count
        and all(isinstance(v, bool | int | float | str) for v in value)
        and (count < 3 or len(set(value)) < count)  # otherwise it numbers the layers
    ]
    return (*parts, tuple(listed))
