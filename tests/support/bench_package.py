"""Importing this makes `bench` importable, and leaves the repository's root off the path: its
folders `kernels/`, `passes/` and `cli/` must not be found there."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(ROOT))
try:
    import bench  # noqa: F401
finally:
    sys.path[:] = [p for p in sys.path if p != str(ROOT)]
