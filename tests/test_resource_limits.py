"""Limits of processes that work on untrusted input."""

from __future__ import annotations

import resource

import pytest

from llmc.resource_limits import limit_resources


@pytest.mark.parametrize(("hard", "expected"), [(resource.RLIM_INFINITY, 7), (9, 7), (5, 5)])
def test_a_stricter_limit_of_the_system_stays(
    hard: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raising it fails for all users but root."""
    made: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, hard))
    monkeypatch.setattr(resource, "setrlimit", made.__setitem__)
    limit_resources(AS=7, CORE=0)
    assert made == {
        resource.RLIMIT_AS: (expected, expected),
        resource.RLIMIT_CORE: (0, 0),
    }
