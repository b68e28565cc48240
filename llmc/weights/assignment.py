"""Determines which stored tensors make up each parameter, by transformers' own conversion rules
(and those of stacked_experts.py and separate_experts.py).

They map a checkpoint's names and layouts to the module's parameters (renamed prefixes, experts
stored one by one but stacked in the module).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CheckpointError
from llmc.weights.checkpoint import Readable
from llmc.weights.parameters import describe_parameters
from llmc.weights.quantized.quantized_tensor import QuantizedTensor
from llmc.weights.separate_experts import separate_experts
from llmc.weights.stacked_experts import rules_of

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A stored tensor used by a converter, under the names that the converter knows."""

    name: str
    pattern: str
    tensor: Readable


class Assignment:
    """Stored tensors assigned to parameters.

    `direct`: parameters stored without conversion. `unexpected`: tensors that no parameter uses.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Readable]) -> None:
        self._module = module
        self._converters: dict[str, Any] = {}  # first target name -> transformers converter
        self._sources: dict[str, list[_Source]] = {}  # first target name -> its sources, in order
        self._target_of: dict[str, str] = {}  # every converted name -> first target name
        self._joins: dict[Any, tuple[int, ...] | None] = {}  # a cache, as layers are alike
        parameters = describe_parameters(module)
        self.shapes = parameters.shapes
        self._aliases = parameters.aliases
        self.direct: dict[str, Readable] = {}
        self.unexpected: list[str] = []
        self._assign(tensors)

    def _assign(self, tensors: Mapping[str, Readable]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        module: Any = self._module  # a PreTrainedModel; Any avoids importing the class
        rules = get_model_conversion_mapping(module)
        renamings = [r for r in rules if isinstance(r, WeightRenaming)]
        converters = [r for r in rules if isinstance(r, WeightConverter)]
        converters += rules_of(module)
        converters += separate_experts(module)  # tried last
        by_pattern = {p: c for c in converters for p in c.source_patterns}
        prefix = getattr(self._module, "base_model_prefix", "")
        state = self._module.state_dict()
        for name in sorted(tensors, key=_natural):
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:
                target, pattern = name, None
            if target not in state:
                self.unexpected.append(name)
            elif pattern is None:
                self.direct[target] = self._oriented(target, tensors[name])
            else:
                converter = self._converters.setdefault(target, by_pattern[pattern])
                source = _Source(name=name, pattern=pattern, tensor=tensors[name])
                self._sources.setdefault(target, []).append(source)
                self._target_of[target] = target
                for other in converter.target_patterns[1:]:
                    self._target_of[target.replace(converter.target_patterns[0], other)] = target

    def _oriented(self, name: str, tensor: Readable) -> Readable:
        """A tensor as its module stores it: quantizers pack channels first even for a Conv1D, whose
        weight is [inputs, channels]."""
        from transformers.pytorch_utils import Conv1D

        if not isinstance(tensor, QuantizedTensor) or not isinstance(
            self._module.get_submodule(name.rpartition(".")[0]), Conv1D
        ):
            return tensor
        return replace(tensor, shape=tensor.shape[::-1], transposed=True)

    @property
    def converted(self) -> Sequence[str]:
        """Parameters made from several stored tensors, or from one in a different layout."""
        return tuple(self._target_of)

    def find(self, name: str) -> Readable | None:
        """The stored tensor of a parameter that needs no conversion, or None."""
        for alias in self._aliases.get(name, (name,)):
            if alias in self.direct:
                return self.direct[alias]
        return None

    def convertible(self, name: str) -> str | None:
        """The name under which a converter creates the parameter, or None."""
        for alias in self._aliases.get(name, (name,)):
            if alias in self._target_of:
                return alias
        return None

    def made_of(self, name: str) -> tuple[Readable, ...]:
        """All tensors that the parameter takes."""
        found, alias = self.find(name), self.convertible(name)
        if found is not None:
            return (found,)
        sources = () if alias is None else self._sources[self._target_of[alias]]
        return tuple(source.tensor for source in sources)

    def convert(self, name: str) -> dict[str, Tensor]:
        """The parameter of this name, and those converted together with it."""
        first = self._target_of[name]
        readers = [_reader(source.tensor) for source in self._sources[first]]
        try:
            return self._convert(first, readers)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as e:
            raise CheckpointError(f"tensors for {first} can't be combined: {e}") from e

    def _convert(self, first: str, readers: Sequence[Callable[[], Tensor]]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converters[first])
        for source, read in zip(self._sources[first], readers, strict=True):
            converter.add_tensor(first, source.name, source.pattern, read)
        made = converter.convert(first, model=self._module, config=self._module.config)
        return {name: v[0] if isinstance(v, list) else v for name, v in made.items()}

    def joined(self, name: str) -> tuple[Readable, ...]:
        """The tensors whose concatenated rows are the rows of the parameter.

        () if the conversion does more than that, which is determined by converting numbered rows.
        """
        alias = self.convertible(name)
        if alias is None:
            return ()
        first = self._target_of[alias]
        sources = self._sources[first]
        layout = tuple((s.pattern, s.tensor.shape) for s in sources)
        key = (layout, alias.rpartition(".")[2], self.shapes[alias])
        if key not in self._joins:
            self._joins[key] = self._join(first, alias)
        order = self._joins[key]
        return tuple(sources[i].tensor for i in order or ())

    def _join(self, first: str, name: str) -> tuple[int, ...] | None:
        shapes = [source.tensor.shape for source in self._sources[first]]
        if not all(len(shape) == 2 and shape[1] == self.shapes[name][-1] for shape in shapes):
            return None
        starts: dict[int, int] = {}  # first row -> its tensor
        numbered: list[Tensor] = []
        total = 0
        for i, (count, _) in enumerate(shapes):
            starts[total] = i
            numbered.append(torch.arange(2 * total, 2 * (total + count)).view(count, 2))
            total += count
        try:
            made = self._convert(first, [t.clone for t in numbered])
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError):
            return None
        found = made.get(name)
        if found is None or tuple(found.shape) != (*self.shapes[name][:-1], 2):
            return None
        rows_of = found.reshape(-1, 2)
        order: list[int] = []
        at = 0
        while at < len(rows_of):
            source = starts.get(int(rows_of[at, 0]) // 2, -1)
            if source < 0:
                return None
            rows = numbered[source]
            if not torch.equal(rows_of[at : at + len(rows)], rows):
                return None
            order.append(source)
            at += len(rows)
        return tuple(order)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key that puts layer 10 after layer 9, as transformers' converters expect."""
    return [(0, int(p)) if _NUMBER.fullmatch(p) else (1, p) for p in name.split(".")]


def _reader(stored: Readable) -> Callable[[], Tensor]:
    return lambda: stored.read()
