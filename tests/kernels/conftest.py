"""The interpreted parts run in a process of their own, beside the tests that come before theirs.

Triton reads TRITON_INTERPRET when its own library is imported, and this process may need, or may
already have, the compiler. They are minutes of one core, which is idle while most tests run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PARTS = ("ops", "prompts", "tuning", "linears", "engine")
TIMEOUT_S = 600


@dataclass(kw_only=True)
class Background:
    """One part after the other, from the moment that the tests have been collected."""

    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    reports: dict[str, Future[tuple[int, str]]] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    is_over: bool = False

    def run(self, part: str) -> tuple[int, str]:
        """(exit code, what pytest printed)."""
        if self.is_over:
            return -1, "the session ended before"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5",
             str(HERE / f"interpreted_{part}.py")],
            cwd=HERE.parents[1],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        try:
            printed, _ = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            printed, _ = self.process.communicate()
            printed += f"\nended after {TIMEOUT_S} s"
        return self.process.returncode, printed[-15000:]

    def end(self) -> None:
        self.is_over = True
        if self.process is not None:
            self.process.kill()
        self.worker.shutdown(cancel_futures=True)


BACKGROUND = pytest.StashKey[Background]()


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = {i.name.partition("[")[2][:-1] for i in session.items if "interpreted" in i.keywords}
    if wanted and not session.config.option.collectonly:
        background = session.config.stash[BACKGROUND] = Background()
        for part in PARTS:
            if part in wanted:
                background.reports[part] = background.worker.submit(background.run, part)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if BACKGROUND in session.config.stash:
        session.config.stash[BACKGROUND].end()


@pytest.fixture
def background(pytestconfig: pytest.Config) -> Background:
    return pytestconfig.stash[BACKGROUND]
