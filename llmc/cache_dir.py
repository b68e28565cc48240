"""The folder of everything that llmc keeps between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where everything that is compiled is kept: $LLMC_CACHE_DIR, else ~/.cache/llmc."""
    given = os.environ.get("LLMC_CACHE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "llmc"


def write_whole(path: Path, text: str) -> None:
    """Write a file of the cache aside and rename it into place; its folder is made for this user.

    Raises OSError for a disk that is full or can't be written.
    """
    import tempfile  # late: most of what asks for the folder writes nothing

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".new-", delete=False, encoding="utf-8"
    ) as aside:
        aside.write(text)
    os.replace(aside.name, path)
