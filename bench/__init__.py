"""Benchmarks: `python -m bench.NAME` from the repository's root. Results are kept in results/.

The root must not stay on the path, because its folders `kernels/`, `passes/` and `cli/` would hide
packages of the same names.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if p and Path(p).resolve() != _ROOT]
