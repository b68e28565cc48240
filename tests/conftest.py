"""Long tests that run in processes of their own, beside the tests that come before theirs.

A machine of two cores has one idle while most tests run. `interpreted` parts are files for Triton's
interpreter: Triton reads TRITON_INTERPRET when its own library is imported, and this process may
need, or may already have, the compiler. `beside` tests are ordinary ones: with many others, pytest
runs those of a file over there and reports here; alone, they run as any test does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PARTS = ("ops", "prompts", "linears", "engine")
TIMEOUT_S = 900
MANY = 100  # tests beside which it pays
INSIDE = "LLMC_TESTS_BESIDE"  # set where a test runs beside the others
Report = tuple[int, str]  # exit code, what pytest printed


@dataclass(kw_only=True)
class Background:
    """One process after the other, from the moment that the tests have been collected."""

    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    reports: dict[str, Future[Report]] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    is_over: bool = False

    def submit(self, name: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self.reports[name] = self.worker.submit(self.run, arguments, environ)

    def run(self, arguments: Sequence[str], environ: Mapping[str, str]) -> Report:
        if self.is_over:
            return -1, "the session ended before"
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        self.process = subprocess.Popen(
            [*command, "--durations=5", *arguments],
            cwd=HERE.parent,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
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


def _is_apart(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("interpreted", "beside"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that are waited for come last."""
    items.sort(key=_is_apart)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    background = Background()
    wanted = {i.name.partition("[")[2][:-1] for i in session.items if "interpreted" in i.keywords}
    for part in PARTS:
        if part in wanted:
            file = str(HERE / "kernels" / f"interpreted_{part}.py")
            environ = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
            background.submit(part, [file], environ)
    if len(session.items) >= MANY and INSIDE not in os.environ:
        apart = [item for item in session.items if "beside" in item.keywords]
        for file in sorted({str(item.path) for item in apart}):
            background.submit(file, [file, "-m", "beside"], {INSIDE: "1"})
        for item in apart:
            item.fixturenames = []  # type: ignore[attr-defined]  # made over there
    session.config.stash[BACKGROUND] = background


def pytest_sessionfinish(session: pytest.Session) -> None:
    if BACKGROUND in session.config.stash:
        session.config.stash[BACKGROUND].end()


@pytest.fixture
def background(pytestconfig: pytest.Config) -> Background:
    return pytestconfig.stash[BACKGROUND]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """A test that ran beside the others: what became of its file there."""
    if "beside" not in pyfuncitem.keywords:
        return None
    report = pyfuncitem.config.stash[BACKGROUND].reports.get(str(pyfuncitem.path))
    if report is None:
        return None
    code, printed = report.result()
    assert code == 0, printed
    return True
