"""Runs interpreted_ops.py and interpreted_engine.py, the Triton ops at work, in their own process.

Triton reads TRITON_INTERPRET when its own library is imported, and this process may need, or may
already have, the compiler.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: its ops cannot be tested")

HERE = Path(__file__).parent


# part -> how many of its tests must at least have run
PARTS = {"ops": 60, "linears": 10, "engine": 2}


@pytest.mark.parametrize("part", PARTS)
def test_under_the_interpreter(part: str) -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5",
         str(HERE / f"interpreted_{part}.py")],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    report = run.stdout[-12000:] + run.stderr[-3000:]
    assert run.returncode == 0, report
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) >= PARTS[part], report
