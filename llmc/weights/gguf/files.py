"""Finds the files of a GGUF model. Imports nothing heavy."""

from __future__ import annotations

import glob
import json
import os
import re
from pathlib import Path

from llmc.errors import CheckpointError

INDEX = "gguf.json"  # next to config.json, in a directory created from a file's header
MAGIC = b"GGUF"  # the first bytes of a file
SUFFIX = ".gguf"  # also in capitals
PART = re.compile(r".*-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def is_gguf_file(path: Path) -> bool:
    """Whether a path names a GGUF file: by its suffix, or (as Ollama's blobs) by its content."""
    if path.suffix.lower() == SUFFIX or not os.path.isfile(path):
        return path.suffix.lower() == SUFFIX
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def name_of(file: str) -> str:
    """A file's name without the suffix of GGUF files."""
    return file[: -len(SUFFIX)] if file.lower().endswith(SUFFIX) else file


def first_part(folder: Path) -> Path | None:
    """The GGUF model of a directory; None if there is none, CheckpointError for several.

    Image encoders and other files that are no models are not counted if there is a model."""
    models = []
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == SUFFIX)
    for file in files:
        part = PART.fullmatch(file.name)
        if part is None or int(part["number"]) == 1:
            models.append(file)
    if len(models) > 1:
        from llmc.weights.gguf.reader import is_other_file

        models = [file for file in models if not is_other_file(file)] or models
    if len(models) > 1:
        names = ", ".join(m.name for m in models[:5])
        raise CheckpointError(
            f"{folder.name!r} contains several GGUF models ({names}); name one file"
        )
    if not models and files:
        raise CheckpointError(f"{folder.name!r} lacks the first part of its split GGUF model")
    return models[0] if models else None


def all_parts(first: Path) -> list[Path]:
    """The files of the model whose first or only file is `first`; some may be missing."""
    part = PART.fullmatch(first.name)
    if part is None:
        return [first]
    return sorted(first.parent.glob("?????".join(map(glob.escape, around_number(part)))))


def around_number(part: re.Match[str]) -> tuple[str, str]:
    """What comes before and after the number in the name of a part."""
    name, (start, end) = part.string, part.span("number")
    return name[:start], name[end:]


def is_gguf(folder: Path) -> bool:
    """Whether a directory's weights are in GGUF files elsewhere."""
    return (folder / INDEX).is_file()


def gguf_files(folder: Path) -> list[Path]:
    """The files with the weights of an index."""
    return [Path(file) for file, _ in json.loads((folder / INDEX).read_text("utf-8"))["files"]]
