"""launched_while_serving.py in a process of its own, since it replaces Triton's driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_process import passed_alone
from tiers import tiered

pytest.importorskip("triton", reason="triton is not installed: nothing can be launched")

TIERS = {"not exhaustive": 4, "exhaustive": 3}  # tier -> how many tests must have passed


@pytest.mark.slow
@pytest.mark.parametrize("tier", tiered(TIERS, "not exhaustive"))
def test_nothing_is_compiled_while_serving(tier: str) -> None:
    script = Path(__file__).with_name("launched_while_serving.py")
    assert passed_alone("-m", tier, script, without=("TRITON_INTERPRET",)) == TIERS[tier]
