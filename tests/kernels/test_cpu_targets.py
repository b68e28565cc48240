"""The op tests and a part of parity, at every level of this processor but the one in use here.

The level of a process is chosen once, so each runs in a process with LLMC_CPU_TARGET set. On a
machine that has x86-64-v3 alone the ordinary tests are that already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import op_cases
import pytest

from llmc.kernels.cpu.levels import VARIABLE, pick_level, supported

HERE = Path(__file__).parent
TESTS = (
    "kernels/test_ops_cpu.py",
    "kernels/test_linear_cpu.py",
    "kernels/test_expert_linear_cpu.py",
    "kernels/test_quantized_linear.py",
    "parity/test_mechanisms.py",
)
OTHERS = [level.name for level in supported() if level != pick_level()]

pytestmark = pytest.mark.slow


ALONE = pytest.param("", marks=pytest.mark.skip(reason="this processor has one level alone"))


@pytest.mark.parametrize("level", OTHERS or [ALONE])
def test_ops_and_parity_at_another_level(level: str) -> None:
    op_cases.require_cpu_ops()
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=HERE.parent,
        env={**os.environ, VARIABLE: level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:]
