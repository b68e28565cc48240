"""The folder for everything that llmc keeps between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder for everything that is compiled: $LLMC_CACHE_DIR, else ~/.cache/llmc."""
    given = os.environ.get("LLMC_CACHE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "llmc"


def write_atomically(path: Path, text: str, *, is_durable: bool = False) -> None:
    """Write a file next to `path` and rename it, so that a reader never sees a partial one; create
    its folder as private. `is_durable`: fsync before returning, which may take a while.

    Raises OSError if the disk is full or not writable, and leaves nothing behind then.
    """
    import tempfile  # late: most callers of this module write nothing

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".new-", delete=False, encoding="utf-8"
    ) as aside:
        try:
            aside.write(text)
            aside.flush()
            if is_durable:
                os.fsync(aside.fileno())
            os.replace(aside.name, path)
        except OSError:
            os.unlink(aside.name)
            raise
