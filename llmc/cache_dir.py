"""The folder for everything that llmc keeps between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder for everything that is compiled: $LLMC_CACHE_DIR, else ~/.cache/llmc."""
    given = os.environ.get("LLMC_CACHE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "llmc"


def write_atomically(path: Path, text: str) -> None:
    """Write a cache file to a temporary file and rename it; create its folder as private.

    Raises OSError if the disk is full or not writable.
    """
    import tempfile  # late: most callers of this module write nothing

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".new-", delete=False, encoding="utf-8"
    ) as aside:
        aside.write(text)
    os.replace(aside.name, path)
