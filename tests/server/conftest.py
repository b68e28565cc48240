"""Fixtures of the server's tests: one server for each file that only asks questions of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_server import Live, live_server


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    """A server that many tests use one after the other; each must leave it idle."""
    with live_server() as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    yield shared
    shared.wait_idle()
