"""Distributes the suite over processes if pytest-xdist is installed: one worker per core.

A file's tests stay on one worker, which creates its fixtures once. Tests with an `xdist_group`
(tests/parity: one per model family) share fixtures across files.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import random
import sys
from collections.abc import Generator

import pytest

MAX_WORKERS = 8  # each has torch and small models in memory: 1 to 2 GB
IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# What is still frozen when Python exits looks leaked: Triton 3.9 would end the output with a list.
atexit.register(gc.unfreeze)
# Only its own tests run the architecture check next to a server; elsewhere it would take cores.
os.environ.setdefault("LLMC_CERTIFICATE", "0")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _is_worker(config: pytest.Config) -> bool:
    """Whether this is a worker, and not a separate run started by a worker's test."""
    return hasattr(config, "workerinput")


if IN_WORKER:  # before torch is imported: workers must not compete for the same cores
    num_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_workers)))


@pytest.hookimpl(tryfirst=True)  # before xdist's own
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use workers unless `-n` was given, or for single files, which run faster in this process."""
    if IN_WORKER or not config.pluginmanager.hasplugin("xdist") or config.option.usepdb:
        return
    if config.option.numprocesses is None:
        are_files = all(".py" in argument for argument in config.args)
        config.option.numprocesses = 0 if are_files else min(MAX_WORKERS, _num_cores())
        config.option.dist = "loadgroup"
        config.option.loadscopereorder = False  # the hook below determines the order


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _is_worker(config):
        return
    config.option.loadgroup = True  # chosen by the hook above; workers only see the command line
    items.sort(key=lambda item: "slow" not in item.keywords)  # so that no slow test starts last
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check that groups work: otherwise each worker would silently create nearly all fixtures."""
    if _is_worker(session.config) and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist's groups don't work with this pytest; use pytest<9.2")
    _skip_torchs_trace()
    _keep_what_is_left()


def pytest_runtest_logstart() -> None:
    _skip_torchs_trace()  # for tests that imported torch themselves


def _skip_torchs_trace() -> None:
    """torch writes the trace of a capture, graphs and guards as text, if its logger has a handler.
    Since 9.1, pytest adds its own to loggers that don't propagate."""
    logging.getLogger("torch.__trace").propagate = True


def _keep_what_is_left() -> None:
    """Modules, tests and captured graphs are never freed: a garbage collection that scans them
    takes up to a second, and every start of an engine triggers one."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """After a file's fixtures ended: what its tests imported or captured stays, too."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _keep_what_is_left()


@pytest.hookimpl(tryfirst=True)  # before any fixture is created
def pytest_runtest_setup() -> None:
    """Seed the generators and reset the log level, which commands that run in this process set, so
    that a test does not depend on what ran before it in its worker."""
    logging.getLogger("llmc").setLevel(logging.NOTSET)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
