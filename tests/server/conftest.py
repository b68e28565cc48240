"""Fixtures of the server's tests: one server for each file that only asks questions of it.

Where the server's dependencies are not installed (a machine for the offline API alone) there is
nothing to test here.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from live_server import Live

NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client", "httpx", "zmq", "msgspec")
if any(find_spec(name) is None for name in NEEDED):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    """A server that many tests use one after the other; each must leave it idle."""
    from live_server import live_server

    with live_server() as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    yield shared
    shared.wait_idle()
