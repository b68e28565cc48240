"""The parts `warm` (fills the caches of compiled code), `cold` (a start without them) and `tests`
(pytest -m gpu).
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.ablation import engine_options, optional_passes
from bench.gpu.record import Record
from bench.gpu.settings import GIB, Settings
from bench.gpu.shapes import read_config, step_bytes
from bench.gpu.subject import running
from bench.tree import ROOT

_AT_ONCE = 8  # processes that compile; each has its own workers
_TESTS_BYTES = 16 * GIB  # of the tests, which run meanwhile
TESTS_S = 230.0  # less than the part's limit, so that what has run is reported


def run_tests(settings: Settings, record: Record) -> None:
    """Run the tests: those of ops, dominated by compiling, on several workers with pytest-xdist."""
    workers = []
    if importlib.util.find_spec("xdist") and not settings.tiny:
        workers = ["-n", str(max(2, (os.cpu_count() or 2) - 2))]
    with ThreadPoolExecutor(2) as pool:
        engine = ["test_gpu_engine.py", "test_gpu_parity.py"]
        ops = ["test_gpu_ops.py", "test_gpu_prompts.py"]
        runs = {
            name: pool.submit(
                run_pytest, settings, files, options, record.beside(f"tests-{name}.xml")
            )
            for name, files, options in (("engine", engine, []), ("ops", ops, workers))
        }
        for name, result in runs.items():
            record.measure(name, result.result)


def run_pytest(
    settings: Settings,
    files: Sequence[str],
    options: Sequence[str],
    junit: Path | None = None,
    seconds: float = TESTS_S,
) -> dict[str, Any]:
    """Run pytest in a separate process. In miniature, without a GPU, it is a dry run. After
    `seconds` it is interrupted, and reports what has run.

    `junit`: its report as XML; what it prints goes to the same name with .log, as it is printed."""
    command = [sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), *(str(ROOT / "tests/gpu" / name) for name in files)]
    command += ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-ra", *options]
    environment = dict(os.environ)
    if settings.tiny:
        environment["LLMC_GPU_DRY_RUN"] = "1"
        command += ["-k", "dry_run"]
    if junit is not None:
        command += [f"--junitxml={junit}"]
    with tempfile.TemporaryDirectory() as folder:
        log = junit.with_suffix(".log") if junit is not None else Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=tempfile.gettempdir(), env=environment, stdout=file,
                stderr=subprocess.STDOUT, preexec_fn=_heed_interrupts,
            )  # fmt: skip
        late = threading.Timer(seconds, process.send_signal, [signal.SIGINT])
        late.daemon = True
        late.start()
        process.wait()
        late.cancel()
        output = log.read_text(encoding="utf-8", errors="replace")
    print(output[-8000:])
    counts = {k: int(n) for n, k in re.findall(r"(\d+) (passed|failed|skipped|error)", output)}
    if process.returncode != 0 or not counts.get("passed"):
        raise RuntimeError(f"pytest: {counts}, status {process.returncode}\n{output[-6000:]}")
    return {**counts, "last": output.strip().splitlines()[-1]}


def _heed_interrupts() -> None:
    """A job that a shell runs in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_warm(settings: Settings, record: Record) -> None:
    """Compile every program and Inductor artifact that later parts need, several at a time."""
    jobs = [f"model {m.name}" for m in settings.models]
    jobs += [f"generate {m.name}" for m in settings.models]
    jobs += [f"level {level}" for level in settings.levels if level > settings.default_level]
    jobs += ["ablation", *(f"off {name}" for name in optional_passes(settings))]
    if settings.tiny:
        record.measure("warm", partial(run_warm_job, settings, jobs[0]))
        return
    room = Room(torch.cuda.mem_get_info()[0] - _TESTS_BYTES if torch.cuda.is_available() else 0)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = [(job, pool.submit(_in_process, settings, job, room)) for job in jobs]
        for job, result in results:
            record.measure(job, result.result)


class Room:
    """Memory that jobs share. One that needs more than there is runs alone."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = num_bytes
        self._taken: list[int] = []
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Wait until there is room, and take it."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._taken or sum(self._taken) + num_bytes <= self._bytes
            )
            self._taken.append(num_bytes)
        try:
            yield
        finally:
            with self._changed:
                self._taken.remove(num_bytes)
                self._changed.notify_all()


def job_bytes(settings: Settings, job: str) -> int:
    """About the memory that a job needs: weights, cache, activations, and CUDA's own."""
    kind, _, name = job.partition(" ")
    is_ablation = kind in ("off", "ablation", "level")
    model = settings.model(settings.ablated if is_ablation else name)
    cache = model.cache_bytes if kind == "model" else 4 * GIB
    weights = step_bytes(read_config(model.config), 2)
    return int(1.1 * weights) + cache + 3 * GIB


def _in_process(settings: Settings, job: str, room: Room) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.gpu", "--warm-job", job]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    with room.taken(job_bytes(settings, job)):
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{job}: {done.stderr[-2000:]}")
    return {"seconds": time.perf_counter() - start, "output": done.stdout[-1500:]}


def run_warm_job(settings: Settings, job: str) -> dict[str, Any]:
    kind, _, name = job.partition(" ")
    if kind == "generate":
        from bench.gpu.peer import Peer

        peer = Peer(settings, settings.model(name))
        return {"seconds": peer.generate(list(range(1, 17)), settings.peer_decode)}
    options: dict[str, Any] = {}
    if kind in ("off", "ablation"):
        options = engine_options(settings) | {"passes": {name: False} if name else {}}
        name = settings.ablated
    elif kind == "level":
        options = engine_options(settings) | {"opt_level": int(name)}
        name = settings.ablated
    with running(settings, settings.model(name), **options) as subject:
        return subject.startup


def run_cold(settings: Settings, record: Record) -> None:
    """Start the first model with empty caches of compiled code, with nothing else running."""
    model = settings.models[0]
    with tempfile.TemporaryDirectory() as folder:
        if not settings.tiny:  # on a CPU this would include building the C++ ops
            for variable in ("LLMC_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                os.environ[variable] = str(Path(folder) / variable.lower())

        def start() -> dict[str, Any]:
            with running(settings, model) as subject:
                return subject.startup

        record.measure(model.name, start)
