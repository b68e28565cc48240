"""The default model: a small one that is distributed in a package on the index.

The package is located but never imported, as its code is for another engine. Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from llmc.cache_dir import cache_dir
from llmc.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultModel:
    """The package `module` contains `file`, a GGUF file with the digest `sha256`.

    `sampling` are sampling parameters that suit the model's size.
    """

    name: str
    module: str
    file: str
    sha256: str
    install: str
    sampling: dict[str, float]

    @property
    def path(self) -> Path | None:
        """Path of the file; None if the package is not installed."""
        try:
            found = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            return None
        if found is None or found.origin is None:
            return None
        path = Path(found.origin).with_name(self.file)
        return path if path.is_file() else None


@cache
def default_model() -> DefaultModel:
    text = files(__package__).joinpath("default_model.json").read_text(encoding="utf-8")
    return DefaultModel(**json.loads(text))


def default_model_path() -> Path:
    """Path of the default model's file. CheckpointError if it is missing or has another digest."""
    model = default_model()
    path = model.path
    if path is None:
        raise CheckpointError(
            f"no model was given, and the default one ({model.name}) is not installed: install it "
            f"with `{model.install}`, or give a model"
        )
    _check_digest(path, model)
    return path


def _check_digest(path: Path, model: DefaultModel) -> None:
    """Check the digest once per file: its size and time are remembered in the cache."""
    stat = path.stat()
    seen = json.dumps([str(path), stat.st_size, stat.st_mtime_ns, model.sha256])
    note = cache_dir() / "default_model.json"
    try:
        if note.read_text(encoding="utf-8") == seen:
            return
    except (OSError, UnicodeDecodeError):
        pass
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise CheckpointError(
            f"{path} is not the published file of {model.name} (sha256 {digest[:16]}... "
            f"instead of {model.sha256[:16]}...); install it again: {model.install} "
            "--force-reinstall"
        )
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_text(seen, encoding="utf-8")
    except OSError:
        pass  # it is checked again next time
