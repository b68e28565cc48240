"""The packages that transformers uses to read tokenizer files other than tokenizer.json.

tokenizer_packages.json lists them by file.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from importlib.resources import files
from pathlib import Path


@functools.cache
def packages_of() -> dict[str, list[str]]:
    text = files(__package__).joinpath("tokenizer_packages.json").read_text(encoding="utf-8")
    table: dict[str, list[str]] = json.loads(text)
    return table


def missing_packages(folder: Path) -> tuple[str, list[str]]:
    """The tokenizer file in a folder that has no tokenizer.json, and the packages for it that are
    not installed. No packages if there is nothing to install."""
    if not (folder / "tokenizer.json").is_file():
        for name, packages in packages_of().items():
            if (folder / name).is_file():
                return name, [package for package in packages if not _is_installed(package)]
    return "", []


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
