"""Passes of users: found under an entry point, named `module:pass` or `file.py:pass`, or given.

They join the pipeline at their place (`Pass.place`) and are switched off like ours. What names
them for the cache is a digest of their code and options, so that an edited pass is run again.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from llmc.errors import ConfigError
from llmc.passes.base import Pass

GROUP = "llmc.passes"


def user_passes(given: Iterable[object]) -> tuple[Pass, ...]:
    """The installed passes, then the given ones; ConfigError for what is no pass."""
    found = [*_installed(), *(_as_pass(item, _said(item)) for item in given)]
    names = [p.name for p in found]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise ConfigError(f"two passes of users are called {twice!r}; rename one of them")
    return tuple(found)


def _installed() -> list[Pass]:
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        said = f"entry point {entry.name} ({entry.value})"
        try:
            loaded = entry.load()
        except (ImportError, AttributeError) as e:
            raise ConfigError(f"{said} of group {GROUP} can't be loaded: {e}") from e
        found.append(_as_pass(loaded, said))
    return found


def _said(item: object) -> str:
    return repr(item)[:100]


def _as_pass(item: object, said: str) -> Pass:
    """A Pass, what makes one when called without options, or the name of either."""
    if isinstance(item, str):
        item = _named(item)
    if callable(item) and not isinstance(item, Pass):
        try:
            item = item()
        except TypeError as e:
            raise ConfigError(f"{said} can't be called without options: {e}") from e
    if not isinstance(item, Pass):
        raise ConfigError(f"{said} is no pass: decorate a function with @graph_pass() and call it")
    if item.required:
        raise ConfigError(f"pass {item.name!r} is a user's and can't be required")
    return item


def _named(name: str) -> object:
    """`package.module:attribute`, or `path/to/file.py:attribute`."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute.isidentifier():
        raise ConfigError(f"{name!r} names no pass: write `module:pass` or `file.py:pass`")
    try:
        module = _from_file(where) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as e:
        raise ConfigError(f"{name!r} can't be imported: {e}") from e
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{where} has no {attribute!r}") from None


def _from_file(where: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {where!r} to take a pass from")
    name = f"llmc_user_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # inspect finds the code of a class or function through it
    spec.loader.exec_module(module)
    return module


def digest(passes: Sequence[Pass]) -> str | None:
    """Of code and options of these passes; None where a graph they made must not be kept."""
    parts = []
    for p in passes:
        code = _code(p.fn)
        options = _plain(dict(p.options))
        if not p.cached or code is None or options is None:
            return None
        parts.append([p.name, p.place, p.changes_model, code, options])
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _code(fn: Any) -> str | None:
    """Digest of the file that a function stands in, or of its folder where that is a package."""
    if fn.__closure__:
        return None  # what it refers to can't be told
    try:
        path = Path(inspect.getfile(fn))
        module = sys.modules.get(fn.__module__)
        files = sorted(path.parent.glob("*.py")) if getattr(module, "__package__", "") else [path]
        return _digest_files(tuple(files))
    except (OSError, TypeError):  # typed in, with no file
        return None


@cache
def _digest_files(files: tuple[Path, ...]) -> str:
    made = hashlib.blake2b(digest_size=16)
    for file in files:
        made.update(file.read_bytes())
    return made.hexdigest()


def _plain(value: object) -> object:
    """Plain data that stands for an option; None where nothing can."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten()
        body = hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=16)
        return ["tensor", str(value.dtype), list(value.shape), body.hexdigest()]
    if isinstance(value, bool | int | float | str):
        return [type(value).__name__, value]
    if value is None:
        return ["none"]
    if isinstance(value, list | tuple):
        items = [_plain(v) for v in value]
        return None if None in items else items
    if isinstance(value, dict):
        named = {str(k): _plain(v) for k, v in value.items()}
        return None if None in named.values() else named
    return None
