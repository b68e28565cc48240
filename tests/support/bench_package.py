"""Importing this makes `bench` importable without the repository's root on the path, where the
folders `kernels/`, `passes/` and `cli/` must not be found."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(ROOT))
try:
    import bench  # noqa: F401
finally:
    sys.path[:] = [p for p in sys.path if p != str(ROOT)]
