"""The Triton ops under Triton's interpreter: the files `interpreted_*.py`, in their own process.

Triton reads TRITON_INTERPRET when its own library is imported, and the other tests of this process
import it without.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_process import passed_alone
from tiers import tiered

pytest.importorskip("triton", reason="triton is not installed: its ops cannot be tested")

# tier -> how many of its tests must at least have run
TIERS = {"not exhaustive": 120, "exhaustive": 40}


@pytest.mark.slow
@pytest.mark.parametrize("tier", tiered(TIERS, "not exhaustive", group="triton {}"))
def test_under_the_interpreter(tier: str) -> None:
    files = sorted(Path(__file__).parent.glob("interpreted_*.py"))
    assert files, "with no file named, pytest would run the whole suite"
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    passed = passed_alone("--durations=5", "-m", tier, *files, variables=variables)
    assert passed >= TIERS[tier]
