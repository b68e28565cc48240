"""Options that were measured on this GPU, used instead of those that the code chooses.

`@tuned` marks a function that chooses options. A table can replace its results: the file that
LLMC_TUNED names, or else tuned/<device>.json. `python -m bench.tune` and `python -m bench.prompts`
write tables. Nothing is measured at startup, and without a table the code's own choice is used.

A line of a table applies to every number of `rows` for which the code chooses the same options: a
table never causes more kernels to be compiled than the code does, and lines about earlier code do
not apply. Programs and Inductor's code call ops, and Triton caches a kernel by its options, so no
cache depends on a table.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, get_type_hints

import torch

logger = logging.getLogger(__name__)

VERSION = 1
NOTHING: Mapping[str, int] = MappingProxyType({})
FOLDER = Path(__file__).with_name("tuned")
Arguments = TypeVarTuple("Arguments")
Options = TypeVar("Options")  # a frozen dataclass of numbers and flags
Key = tuple[str, tuple[Any, ...], Any]  # function, its arguments but `rows`, what the code chooses


_POWERS_OF_2 = ("block_", "combine_", "num_warps")  # how such options begin: Triton has no others


class Tuned(Generic[*Arguments, Options]):
    """A function that chooses options. `rule`: the function as written, without a table."""

    def __init__(
        self,
        rule: Callable[[*Arguments], Options],
        fixed: Collection[str] = (),
        least: Mapping[str, int] = NOTHING,
    ) -> None:
        self.rule = rule
        self.name = rule.__name__
        self.options: type[Options] = get_type_hints(rule)["return"]
        names = list(inspect.signature(rule).parameters)
        self.shape = {name: i for i, name in enumerate(names) if name != "rows"}
        self._fixed, self._least = fixed, least

    def __call__(self, *args: *Arguments) -> Options:
        chosen = self.rule(*args)
        if not (table := load_table()):
            return chosen
        found: Options = table.get(self.key(args, chosen), chosen)
        return found

    def key(self, args: tuple[Any, ...], chosen: Options) -> Key:
        return self.name, tuple(args[i] for i in self.shape.values()), chosen

    def accepts(self, options: Options, chosen: Options) -> bool:
        """Whether the kernel, if it can be compiled, computes the same as with `chosen`. Numbers
        are positive, and sizes of tiles powers of two, unless the code itself chooses another."""
        for name, kind in _kinds(self.options).items():
            new, old = getattr(options, name), getattr(chosen, name)
            too_small = kind == "int" and new < self._least.get(name, 1)
            uneven = name.startswith(_POWERS_OF_2) and new & (new - 1)
            if new != old and (name in self._fixed or too_small or uneven):
                return False
        return True

    def read(self, line: Mapping[str, Any]) -> tuple[Key, Options]:
        """A line of a table. Raises ValueError where it does not fit the code."""
        shape, chosen, options = line["arguments"], line["chosen"], line["options"]
        if set(shape) != set(self.shape):
            raise ValueError(f"the arguments of {self.name} are {', '.join(self.shape)}")
        old, new = self._made(chosen), self._made(options)
        if not self.accepts(new, old):
            raise ValueError(f"{self.name} can't use {options}")
        return (self.name, tuple(shape[name] for name in self.shape), old), new

    def _made(self, values: Mapping[str, Any]) -> Options:
        kinds = _kinds(self.options)
        if {name: type(value).__name__ for name, value in values.items()} != kinds:
            raise ValueError(f"{self.name} chooses {kinds}, which {values} is not")
        return self.options(**values)


def _kinds(options: Any) -> dict[str, str]:
    """The types of a dataclass's fields, by name."""
    return {field.name: str(field.type) for field in fields(options)}


FUNCTIONS: dict[str, Tuned[*tuple[Any, ...], Any]] = {}


class _Mark(Protocol):
    def __call__(self, rule: Callable[[*Arguments], Options]) -> Tuned[*Arguments, Options]: ...


def tuned(fixed: Collection[str] = (), least: Mapping[str, int] = NOTHING) -> _Mark:
    """Decorator. With other values of the options `fixed`, or lower ones than `least`, the kernel
    could compute something else, or not be compiled, for other calls that a line is for."""

    def mark(rule: Callable[[*Arguments], Options]) -> Tuned[*Arguments, Options]:
        made = FUNCTIONS[rule.__name__] = Tuned(rule, fixed, least)
        return made

    return mark


@cache
def device_name() -> str:
    """The name of the current GPU, "cpu" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@cache
def load_table() -> Mapping[Key, Any]:
    """The lines of this device's table; empty if there is none that can be used."""
    if (path := _path()) is None:
        return {}
    try:
        table = read_table(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is not used, the code's own launch options are: %r", path, error)
        return {}
    logger.info("%d launch options are those measured in %s", len(table), path)
    return table


def _path() -> Path | None:
    """LLMC_TUNED, which is empty to use no table, or else the table that llmc brings."""
    if (named := os.environ.get("LLMC_TUNED")) is not None:
        return Path(named) if named else None
    path = FOLDER / f"{re.sub('[^a-z0-9]+', '-', device_name().lower())}.json"
    return path if path.is_file() else None


def read_table(path: Path) -> dict[Key, Any]:
    """Raises ValueError for a table of another device or version, or lines that do not fit."""
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module("llmc.kernels.triton")  # which has most of the functions
    data = json.loads(path.read_text(encoding="utf-8"))
    if (data["version"], data["device"]) != (VERSION, device_name()):
        raise ValueError(f"it is of version {data['version']}, measured on {data['device']}")
    unknown = {line["function"] for line in data["lines"]} - set(FUNCTIONS)
    if unknown:
        raise ValueError(f"there are no functions {sorted(unknown)}")
    return dict(FUNCTIONS[line["function"]].read(line) for line in data["lines"])
