"""The folder of everything that llmc keeps between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where everything that is compiled is kept: $LLMC_CACHE_DIR, else ~/.cache/llmc."""
    given = os.environ.get("LLMC_CACHE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "llmc"
