"""How the suite is spread over processes, where pytest-xdist is installed: one worker per core.

A file's tests stay on one worker, for the sake of what its fixtures make; tests with
an `xdist_group` (tests/parity: one for each model family) share that across files.
"""

from __future__ import annotations

import gc
import os
import random
import sys

import pytest

MOST_WORKERS = 8  # each holds torch and small models: 1 to 2 GB
IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Servers of other tests than its own make no certificate beside them: it would take their cores.
os.environ.setdefault("LLMC_CERTIFICATE", "0")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _is_worker(config: pytest.Config) -> bool:
    """Rather than a run of its own that a worker's test has started."""
    return hasattr(config, "workerinput")


if IN_WORKER:  # before torch is imported: workers must not compete for the same cores
    num_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_workers)))


@pytest.hookimpl(tryfirst=True)  # before xdist's own
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Workers unless `-n` was given. None for single files, which run sooner in this process."""
    if IN_WORKER or not config.pluginmanager.hasplugin("xdist") or config.option.usepdb:
        return
    if config.option.numprocesses is None:
        are_files = all(".py" in argument for argument in config.args)
        config.option.numprocesses = 0 if are_files else min(MOST_WORKERS, _num_cores())
        config.option.dist = "loadgroup"
        config.option.loadscopereorder = False  # the order is that of the hook below


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _is_worker(config):
        return
    config.option.loadgroup = True  # what the hook above chose: workers read the command line only
    items.sort(key=lambda item: "slow" not in item.keywords)  # so that nothing long begins last
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Else every worker would make the fixtures of nearly every file, and nothing would say so."""
    if _is_worker(session.config) and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist takes no groups from this pytest; install pytest<9.2")
    # Modules and tests stay: a collection of garbage takes up to a second where it looks at all of
    # them, and each start of an engine is one.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before any fixture's values are made
def pytest_runtest_setup() -> None:
    """A test draws the same numbers whatever ran before it in its worker."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
