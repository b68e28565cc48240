"""The Triton ops under Triton's interpreter, each file of `interpreted_*.py` in its own process.

Triton reads TRITON_INTERPRET when its own library is imported, and the other tests of this process
import it without.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import tiered

pytest.importorskip("triton", reason="triton is not installed: its ops cannot be tested")

# (part, tier) -> how many of its tests must at least have run
PARTS = {
    ("ops", "not exhaustive"): 60,
    ("prompts", "not exhaustive"): 12,
    ("linears", "not exhaustive"): 10,
    ("engine", "not exhaustive"): 1,
    ("ops", "exhaustive"): 40,
    ("engine", "exhaustive"): 2,
}
ORDINARY = [key for key in PARTS if key[1] != "exhaustive"]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "tier"), tiered(PARTS, *ORDINARY, group="triton {}"))
def test_under_the_interpreter(part: str, tier: str) -> None:
    file = Path(__file__).with_name(f"interpreted_{part}.py")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    kept = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        [*command, "--durations=5", "-m", tier, str(file)],
        cwd=file.parents[2],
        env={**kept, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-15000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= PARTS[part, tier], done.stdout[-15000:]
