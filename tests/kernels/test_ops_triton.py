"""The Triton ops under Triton's interpreter: the files `interpreted_*.py`, in their own process.

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

# tier -> how many of its tests must at least have run
TIERS = {"not exhaustive": 120, "exhaustive": 40}


@pytest.mark.slow
@pytest.mark.parametrize("tier", tiered(TIERS, "not exhaustive", group="triton {}"))
def test_under_the_interpreter(tier: str) -> None:
    files = sorted(Path(__file__).parent.glob("interpreted_*.py"))
    assert len(files) == 6
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    kept = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        [*command, "--durations=5", "-m", tier, *map(str, files)],
        cwd=files[0].parents[2],
        env={**kept, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-15000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= TIERS[tier], done.stdout[-15000:]
