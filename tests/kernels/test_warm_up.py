"""launched_while_serving.py in a process of its own, since it replaces Triton's driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import tiered

pytest.importorskip("triton", reason="triton is not installed: nothing can be launched")

TIERS = {"not exhaustive": 2, "exhaustive": 2}  # tier -> how many tests must have passed


@pytest.mark.slow
@pytest.mark.parametrize("tier", tiered(TIERS, "not exhaustive"))
def test_nothing_is_compiled_while_serving(tier: str) -> None:
    script = Path(__file__).with_name("launched_while_serving.py")
    kept = {
        name: value
        for name, value in os.environ.items()
        if "XDIST" not in name and name != "TRITON_INTERPRET"
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", tier, script],
        cwd=script.parents[2],
        env=kept,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-15000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) == TIERS[tier], done.stdout[-15000:]
