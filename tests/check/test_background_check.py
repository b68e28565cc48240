"""The process of a check beside an engine: one that is slow to start, and one that can't."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.check.background import BackgroundCheck
from llmc.config import EngineConfig


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path))


def uncertified(monkeypatch: pytest.MonkeyPatch, start: Any) -> tuple[Any, list[Any]]:
    """A check whose process is started by `start`, and what it found."""
    found: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", start)
    info = SimpleNamespace(certificate_key="unknown")
    return BackgroundCheck(EngineConfig(), info, found.append), found  # type: ignore[arg-type]


def check_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "llmc-certificate"]


def test_a_process_that_is_being_started_ends_with_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, killed = threading.Event(), threading.Event()

    class Slow:
        returncode = -9

        def __init__(self, *_: Any, **__: Any) -> None:
            begun.set()
            time.sleep(0.3)

        def kill(self) -> None:
            killed.set()

        def communicate(self, _: bytes) -> tuple[bytes, None]:
            assert killed.wait(5), "it goes on after the check's end"
            return b"", None

    check, found = uncertified(monkeypatch, Slow)
    with check:
        assert begun.wait(5)
    assert killed.is_set()
    for thread in check_threads():
        thread.join(10)
    assert found == []


def test_a_process_that_can_not_be_started_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("Cannot allocate memory")

    check, found = uncertified(monkeypatch, fail)
    with check:
        for thread in check_threads():
            thread.join(10)
    [certificate] = found
    assert certificate.status == "not checked"
    assert "did not start: Cannot allocate memory" in certificate.reason
