"""Undoes the changes that the GGUF converter makes to a model's tensors.

transformers has a processor for most architectures: permuted rows, norm weights plus one,
transposed matrices. This module adds what those lack, according to rules.json: steps for a single
tensor, and steps for parameters joined from several tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.weights.gguf.rules import squashed

RULES = ("processor", "steps", "joined")  # the parts of an architecture's rule that are read here
Array = NDArray[Any]
Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Processor:
    """`inner` is transformers' processor, which uses fields of `config`.

    `steps`: pattern of a tensor's name -> name of a step. `joined`: the same for parameters that
    concatenate the rows of several tensors; the pattern matches the first one's name.
    """

    inner: Any
    config: Config
    steps: Mapping[str, str]
    joined: Mapping[str, str]

    def undo(self, parts: Sequence[tuple[str, Array]], *, only_rows: bool = False) -> Array:
        """The parameter made from its tensors (name, values), given in order. With `only_rows`, the
        columns stay in the file's order."""
        numbers = [self._undo_one(*part, only_rows=only_rows) for part in parts]
        if len(numbers) == 1:
            return numbers[0]
        name = parts[0][0]
        whole = np.concatenate(numbers, -1 if name.endswith(".bias") else -2)
        return self._steps(self.joined, name, whole)

    def columns(self, name: str, depth: int) -> Array | None:
        """The file's column for each of a parameter's; None if they are in order."""
        order = np.arange(depth)
        for step in self._named(self.steps, name):
            if step in _OF_COLUMNS:
                order = _OF_COLUMNS[step](order, self.config)
        return None if np.array_equal(order, np.arange(depth)) else order

    def _undo_one(self, name: str, numbers: Array, *, only_rows: bool) -> Array:
        numbers = self._steps(self.steps, name, numbers)
        if not only_rows and (order := self.columns(name, numbers.shape[-1])) is not None:
            numbers = numbers[..., order]
        if "_exps." in name:  # transformers' processors would join experts in their own way
            return numbers
        made: dict[str, Any] = {}
        result = self.inner.process(
            weights=numbers,
            name=name,
            tensor_key_mapping={},
            parsed_parameters={"tensors": made},
        )
        done: Array = next(iter(made.values())).numpy() if made else result.weights
        return done

    def _steps(self, steps: Mapping[str, str], name: str, numbers: Array) -> Array:
        for step in self._named(steps, name):
            if step not in _OF_COLUMNS:
                numbers = _STEPS[step](numbers, self.config)
        return numbers

    def _named(self, steps: Mapping[str, str], name: str) -> list[str]:
        return [step for pattern, step in steps.items() if re.search(pattern, name)]


def _by_group(numbers: Array, sizes: Sequence[int], groups: int) -> Array:
    """Rows ordered by kind, then by head -> ordered by group of heads, then by kind."""
    if sum(sizes) != len(numbers) or any(size % groups for size in sizes):
        raise ValueError(f"{len(numbers)} rows are not {' + '.join(map(str, sizes))}")
    kinds = np.split(numbers, np.cumsum(sizes)[:-1])
    by_group = [kind.reshape(groups, -1, *numbers.shape[1:]) for kind in kinds]
    return np.concatenate(by_group, axis=1).reshape(numbers.shape)


def _heads_by_group(numbers: Array, config: Config) -> Array:
    """Fused queries, keys and values."""
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    size = len(numbers) // (heads + 2 * groups)
    return _by_group(numbers, (heads * size, groups * size, groups * size), groups)


def _states_by_group(numbers: Array, config: Config) -> Array:
    """Fused queries, keys, values and gates of linear attention."""
    groups = int(config["linear_num_key_heads"])
    keys = groups * int(config["linear_key_head_dim"])
    values = int(config["linear_num_value_heads"]) * int(config["linear_value_head_dim"])
    return _by_group(numbers, (keys, keys, values, values), groups)


def _values_by_group(numbers: Array, config: Config) -> Array:
    """Linear attention's values: the first head of each group, the second, ... -> by group."""
    groups = int(config["linear_num_key_heads"])
    by_number = numbers.reshape(
        int(config["linear_num_value_heads"]) // groups, groups, -1, *numbers.shape[1:]
    )
    return by_number.swapaxes(0, 1).reshape(numbers.shape)


def _values_behind_keys(numbers: Array, config: Config) -> Array:
    """The same, for a tensor in which queries and keys precede the values."""
    keys = 2 * int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"])
    return np.concatenate((numbers[:keys], _values_by_group(numbers[keys:], config)))


# by their names in rules.json
_STEPS: Mapping[str, Callable[[Array, Config], Array]] = {
    "turned": lambda numbers, _: numbers.swapaxes(-1, -2),
    "logarithm": lambda numbers, _: np.log(numbers),
    "logarithm of negative": lambda numbers, _: np.log(-numbers),
    "alternating": lambda numbers, _: np.stack(np.split(numbers, 2, -1), -1).reshape(numbers.shape),
    "pairs apart": lambda numbers, _: numbers.reshape(-1, 2).T.reshape(-1),
    "squeezed": lambda numbers, _: numbers.squeeze(),
    "one less": lambda numbers, _: numbers - 1,
    "rows of length one": lambda numbers, _: (
        numbers / np.linalg.norm(numbers, axis=-1, keepdims=True).clip(1e-12)
    ),
    "heads by group": _heads_by_group,
    "states by group": _states_by_group,
    "values by group": _values_by_group,
    "values behind keys by group": _values_behind_keys,
}
# the same, for steps that only order columns: of these, the file's for each of the parameter's
_OF_COLUMNS: Mapping[str, Callable[[Array, Config], Array]] = {
    "columns of values by group": _values_by_group
}


def processor_of(architecture: str, config: Config, rule: Mapping[str, Any]) -> Processor:
    """The processor of an architecture, by its rule. `config` has transformers' field names."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    kinds = {squashed(name): kind for name, kind in TENSOR_PROCESSORS.items()}
    kind: Any = kinds.get(squashed(rule.get("processor", architecture)), TensorProcessor)
    return Processor(
        inner=kind(config=dict(config)),
        config=config,
        steps=rule.get("steps", {}),
        joined=rule.get("joined", {}),
    )
