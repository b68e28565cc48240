"""Waits for interpreted_ops.py and its like, the Triton ops at work in a process of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: its ops cannot be tested")

# part -> how many of its tests must at least have run
PARTS = {"ops": 60, "prompts": 12, "linears": 10, "engine": 2}


@pytest.mark.interpreted  # tests/conftest.py starts them
@pytest.mark.parametrize("part", PARTS)
def test_under_the_interpreter(part: str, background: Any) -> None:
    code, report = background.reports[part].result()
    assert code == 0, report
    passed = re.search(r"(\d+) passed", report)
    assert passed and int(passed[1]) >= PARTS[part], report
