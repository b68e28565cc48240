"""User code: how it is named and found, and a digest that identifies what was made with it.

Passes (user.py) and logits processors (logits_processors.py) are given as objects, as
`package.module:attribute` or `path/to/file.py:attribute`, or are installed under an entry point.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from llmc.errors import ConfigError, reason_of
from llmc.passes.user_names import file_of, no_attribute, split_name


def find(group: str, given: Iterable[object], what: str) -> Iterator[tuple[object, str]]:
    """The objects installed under an entry-point group, then the given ones, with descriptions.

    `what` says what they are, for error messages. Names are looked up; other objects are returned
    unchanged.
    """
    for entry in sorted(entry_points(group=group), key=lambda e: e.name):
        source = f"entry point {entry.name} ({entry.value})"
        try:
            loaded = entry.load()
        except (ImportError, AttributeError) as e:
            raise ConfigError(f"{source} of group {group} can't be loaded: {e}") from e
        yield loaded, source
    for item in given:
        yield _named(item, what) if isinstance(item, str) else item, repr(item)[:100]


def called(item: Any, source: str) -> Any:
    """Call a factory or class without options."""
    try:
        return item()
    except TypeError as e:
        raise ConfigError(f"{source} can't be called without options: {e}") from e


def check_names(names: list[str], what: str) -> None:
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise ConfigError(f"two user {what} are called {twice!r}; rename one of them")


def _named(name: str, what: str) -> object:
    where, attribute = split_name(name, what)
    path = file_of(where)
    try:
        module = importlib.import_module(where) if path is None else _from_file(path)
    except Exception as e:  # whatever the user's module raises
        raise ConfigError(f"{name!r} can't be imported: {reason_of(e)}") from e
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise no_attribute(where, attribute) from None


def _from_file(path: Path) -> ModuleType:
    name = f"llmc_user_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # inspect finds the code of a class or function through it
    spec.loader.exec_module(module)
    return module


def code_digest(code: Any) -> str | None:
    """Digest of the file that defines a function or class, or of its folder if it is in a
    package."""
    if getattr(code, "__closure__", None):
        return None  # it captures values that the digest can't cover
    try:
        path = Path(inspect.getfile(code))
        module = sys.modules.get(code.__module__)
        files = sorted(path.parent.glob("*.py")) if getattr(module, "__package__", "") else [path]
        return _digest_files(tuple(files))
    except (OSError, TypeError):  # defined interactively, without a file
        return None


@cache
def _digest_files(files: tuple[Path, ...]) -> str:
    made = hashlib.blake2b(digest_size=16)
    for file in files:
        made.update(file.read_bytes())
    return made.hexdigest()


def plain(value: object) -> object:
    """Convert an option to plain data; None if that is not possible."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten()
        body = hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=16)
        return ["tensor", str(value.dtype), list(value.shape), body.hexdigest()]
    if isinstance(value, bool | int | float | str):
        return [type(value).__name__, value]
    if value is None:
        return ["none"]
    if isinstance(value, list | tuple):
        items = [plain(v) for v in value]
        return None if None in items else items
    if isinstance(value, dict):
        named = {str(k): plain(v) for k, v in value.items()}
        return None if None in named.values() else named
    return None
