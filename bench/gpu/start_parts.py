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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.ablation import engine_options, pass_switches
from bench.gpu.record import Record
from bench.gpu.settings import Settings
from bench.gpu.subject import running
from bench.gpu.tree import ROOT

_AT_ONCE = 8  # processes that compile; each has its own workers
TESTS_S = 230.0  # less than the part's limit, so that what has run is reported


def run_tests(settings: Settings, record: Record) -> None:
    """Run the tests: those of ops, dominated by compiling, on several workers with pytest-xdist."""
    workers = ["-n", "10"] if importlib.util.find_spec("xdist") and not settings.tiny else []
    with ThreadPoolExecutor(2) as pool:
        engine = ["test_gpu_engine.py", "test_gpu_parity.py"]
        ops = ["test_gpu_ops.py", "test_gpu_prompts.py"]
        runs = {
            "engine": pool.submit(run_pytest, settings, engine, []),
            "ops": pool.submit(run_pytest, settings, ops, workers),
        }
        for name, result in runs.items():
            record.measure(name, result.result)


def run_pytest(
    settings: Settings, files: Sequence[str], options: Sequence[str], seconds: float = TESTS_S
) -> dict[str, Any]:
    """Run pytest in a separate process. In miniature, without a GPU, it is a dry run. After
    `seconds` it is interrupted, and reports what has run."""
    command = [sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), *(str(ROOT / "tests/gpu" / name) for name in files)]
    command += ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-ra", *options]
    environment = dict(os.environ)
    if settings.tiny:
        environment["LLMC_GPU_DRY_RUN"] = "1"
        command += ["-k", "dry_run"]
    process = subprocess.Popen(
        command, cwd=tempfile.gettempdir(), env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    late = threading.Timer(seconds, process.send_signal, [signal.SIGINT])
    late.daemon = True
    late.start()
    output, _ = process.communicate()
    late.cancel()
    print(output[-8000:])
    counts = {k: int(n) for n, k in re.findall(r"(\d+) (passed|failed|skipped|error)", output)}
    if process.returncode != 0 or not counts.get("passed"):
        raise RuntimeError(f"pytest: {counts}, status {process.returncode}\n{output[-6000:]}")
    return {**counts, "last": output.strip().splitlines()[-1]}


def run_warm(settings: Settings, record: Record) -> None:
    """Compile every program and Inductor artifact that later parts need, several at a time."""
    jobs = [f"model {m.name}" for m in settings.models]
    jobs += [f"generate {m.name}" for m in settings.models]
    switches = pass_switches(settings).items()
    jobs += ["ablation", *(f"{'on' if is_on else 'off'} {name}" for name, is_on in switches)]
    if settings.tiny:
        record.measure("warm", partial(run_warm_job, settings, jobs[0]))
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = [(job, pool.submit(_in_process, job)) for job in jobs]
        for job, result in results:
            record.measure(job, result.result)


def _in_process(job: str) -> dict[str, Any]:
    start = time.perf_counter()
    command = [sys.executable, "-m", "bench.gpu", "--warm-job", job]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
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
    if kind in ("on", "off", "ablation"):
        options = engine_options(settings) | {"passes": {name: kind == "on"} if name else {}}
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
