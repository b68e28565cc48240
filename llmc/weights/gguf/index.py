"""Which directories were made of GGUF files, and of which. Imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path

INDEX = "gguf.json"  # in a directory beside config.json


def is_gguf(folder: Path) -> bool:
    """Whether a directory's weights lie in GGUF files elsewhere."""
    return (folder / INDEX).is_file()


def gguf_files(folder: Path) -> list[Path]:
    """Where the weights of an index lie."""
    return [Path(file) for file, _ in json.loads((folder / INDEX).read_text("utf-8"))["files"]]
