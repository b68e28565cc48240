"""Finds the files of a GGUF model. Imports nothing heavy."""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path

from llmc.errors import CheckpointError

INDEX = "gguf.json"  # next to config.json, in a directory created from a file's header
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def first_part(folder: Path) -> Path | None:
    """The GGUF model of a directory; None if there is none, CheckpointError for several."""
    models = []
    for file in sorted(folder.glob("*.gguf")):
        part = PART.fullmatch(file.name)
        if part is None or int(part["number"]) == 1:
            models.append(file)
    if len(models) > 1:
        names = ", ".join(m.name for m in models[:5])
        raise CheckpointError(
            f"{folder.name!r} contains several GGUF models ({names}); name one file"
        )
    if not models and any(folder.glob("*.gguf")):
        raise CheckpointError(f"{folder.name!r} lacks the first part of its split GGUF model")
    return models[0] if models else None


def all_parts(first: Path) -> list[Path]:
    """The files of the model whose first or only file is `first`; some may be missing."""
    part = PART.fullmatch(first.name)
    if part is None:
        return [first]
    return sorted(first.parent.glob(f"{glob.escape(part['stem'])}-?????-of-{part['count']}.gguf"))


def is_gguf(folder: Path) -> bool:
    """Whether a directory's weights are in GGUF files elsewhere."""
    return (folder / INDEX).is_file()


def gguf_files(folder: Path) -> list[Path]:
    """The files with the weights of an index."""
    return [Path(file) for file, _ in json.loads((folder / INDEX).read_text("utf-8"))["files"]]
