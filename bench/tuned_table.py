"""Tables of launch options (kernels/tuned.py): which keys calls ask for, using one, writing one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from llmc.kernels import tuned
from llmc.kernels.tuned import FUNCTIONS, VERSION, Key, device_name, read_table
from llmc.load_test.machine import package_versions
from llmc.load_test.report import context, write_json


class Asked(dict[Key, Any]):
    """An empty table that keeps the keys it was asked for."""

    def __bool__(self) -> bool:
        return True

    def get(self, key: Key, default: Any = None) -> Any:
        self[key] = default
        return default


@contextlib.contextmanager
def using(table: Mapping[Key, Any]) -> Iterator[None]:
    with mock.patch.object(tuned, "load_table", lambda: table):
        yield


def make_line(key: Key, options: Any, measured: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the table. `measured`: what it is based on, for readers."""
    name, shape, chosen = key
    versions = package_versions()
    return {
        "function": name,
        "arguments": dict(zip(FUNCTIONS[name].shape, shape, strict=True)),
        "chosen": asdict(chosen),
        "options": asdict(options),
        "measured": measured,
        "date": context()["date"],
        "versions": {name: versions.get(name) for name in ("torch", "triton")},
    }


def write_lines(path: Path, lines: Mapping[Key, Mapping[str, Any] | None]) -> None:
    """Replace or, for None, remove lines of the table at `path`; a new one if there is none that
    fits the code."""
    kept: dict[Key, Mapping[str, Any] | None] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        old = json.loads(path.read_text(encoding="utf-8"))["lines"]
        kept = dict(zip(read_table(path), old, strict=True))
    left = [line for line in {**kept, **lines}.values() if line is not None]
    write_json(path, {"version": VERSION, "device": device_name(), "lines": left})
