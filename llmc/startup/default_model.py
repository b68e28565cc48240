"""The model that runs when none is named: a small one that a package on the index holds.

The package is looked up, never imported: its own code is for another engine. Imports nothing heavy.
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
    """`file`, a GGUF file of digest `sha256`, lies in the package `module`.

    `sampling` are the parameters that suit the model's size.
    """

    name: str
    module: str
    file: str
    sha256: str
    install: str
    sampling: dict[str, float]

    @property
    def path(self) -> Path | None:
        """None where the package is not installed."""
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
    """Its file, which is whole. CheckpointError where it is missing or another one."""
    model = default_model()
    path = model.path
    if path is None:
        raise CheckpointError(
            f"no model was named, and the default one ({model.name}) is not installed: get it with "
            f"`{model.install}`, or name a model"
        )
    _check_digest(path, model)
    return path


def _check_digest(path: Path, model: DefaultModel) -> None:
    """Once for each file: its size and time are remembered in the cache."""
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
            f"{path} is not the file that {model.name} was published as (sha256 {digest[:16]}... "
            f"instead of {model.sha256[:16]}...); install it again: {model.install} "
            "--force-reinstall"
        )
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_text(seen, encoding="utf-8")
    except OSError:
        pass  # it is read again next time
