"""Reads and checks fields of a `quantization_config`: errors give the value and a way out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmc.errors import CheckpointError
from llmc.weights.patterns import at_start

ALL = 0  # as a block size: all channels or inputs
WAY_OUT = "use another quantization of the model, or its original checkpoint"


def bad(problem: str) -> CheckpointError:
    return CheckpointError(f"quantization_config in config.json: {problem}")


def one_of(
    fields: Mapping[str, Any], key: str, default: Any, known: Sequence[Any], where: str = ""
) -> Any:
    value = fields.get(key, default)
    value = default if value is None else value
    if isinstance(value, bool) or value not in known:
        names = ", ".join(str(k) for k in known)
        raise bad(f"{where}{key} is {value!r}; llmc supports {names}; {WAY_OUT}")
    return value


def group_size(fields: Mapping[str, Any], key: str, where: str = "") -> int:
    """The number of inputs that share a scale; -1 means all of them."""
    value = fields.get(key, 128)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise bad(f"{where}{key} is {value!r}; it must be a number of inputs, or -1 for all")
    return ALL if value == -1 else value


def block_size(fields: Mapping[str, Any], key: str, where: str = "") -> tuple[int, int]:
    value = fields.get(key)
    if isinstance(value, str) and re.fullmatch(r"\d+x\d+", value):  # of compressed-tensors once
        value = [int(n) for n in value.split("x")]
    sizes = value if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise bad(f"{where}{key} is {value!r}; it must be two numbers, [channels, inputs]")
    return sizes[0], sizes[1]


def names_in(fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = fields.get(key) or ()
    if not isinstance(value, list | tuple) or not all(isinstance(n, str) for n in value):
        raise bad(f"{key} is {value!r}; it must be a list of module names")
    return tuple(value)


def mapping_in(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = fields.get(key) or {}
    if not isinstance(value, Mapping):
        raise bad(f"{key} is {value!r} instead of an object")
    return value


def check_pattern(pattern: str) -> None:
    try:
        at_start(pattern)
    except ValueError as e:
        raise bad(f"the pattern {pattern!r:.200} can't be used: {e}") from e


def is_at_start(pattern: str, module: str) -> bool:
    """Whether a pattern that has been checked matches the start of a module's name."""
    try:
        return at_start(pattern)(module)
    except ValueError as e:
        raise bad(f"the pattern {pattern!r:.200} can't be used: {e}") from e
