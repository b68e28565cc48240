"""The two tiers of the suite: `pytest` runs the ordinary tests, CI the exhaustive ones as well.

Exhaustive tests take minutes, or repeat an ordinary test for another family, format, dtype or
target. `pytest -m ""` runs all tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def tiered(values: Iterable[Any], *ordinary: Any, group: str = "") -> list[Any]:
    """`values` as parameters; all but `ordinary` are exhaustive. `group` is the xdist_group of
    each, with {} for the value."""
    made = list(values)
    assert all(one in made for one in ordinary), f"{ordinary} are not among {made}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[
                *([] if value in ordinary else [pytest.mark.exhaustive]),
                *([pytest.mark.xdist_group(group.format(value))] if group else []),
            ],
        )
        for value in made
    ]
