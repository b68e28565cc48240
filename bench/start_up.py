"""Measures process start to first token: cold and warm caches, models of 4, 28 and 80 layers.

    python -m bench.start_up [--layers 4 28 80] [--rounds 1] [--config FILE]
                             [--disable-pass outline_layers] [--output-json FILE]

Each start is a separate process with random weights. Cold: its cache folder is empty, so the model
is captured and the C++ ops are built. Warm: the cache of a cold start exists, including C++ ops.
`warm ops`: only the C++ ops exist, so the model is captured (a new architecture on a machine that
has served before). Times start when the process is created.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Start = dict[str, Any]
KINDS = ("cold", "warm ops", "warm")
_PROMPT_TOKENS = 16
_BUILD_LIMIT_S = 600


def main() -> None:
    args = _arguments()
    if args.child:
        print(json.dumps(_start(args.child, args.since, args.disable_pass, args.await_ops)))
        return
    results = [
        _measure(args.config, layers, args.rounds, args.disable_pass) for layers in args.layers
    ]
    print_table(results)
    if args.output_json:
        from llmc.load_test.machine import describe_machine, package_versions
        from llmc.load_test.report import context, write_json

        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        write_json(args.output_json, {**facts, "starts": results})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=Path("bench/configs/qwen3-0.6b.json"))
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 28, 80])
    parser.add_argument("--rounds", type=int, default=1, help="starts of each kind")
    parser.add_argument("--disable-pass", action="append", default=[])
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--since", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--await-ops", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(config: Path, layers: int, rounds: int, disabled: Sequence[str]) -> dict[str, Any]:
    """All kinds of start for one depth."""
    starts: dict[str, list[Start]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            model, cache = Path(folder) / "model", Path(folder) / "cache"
            model.mkdir()
            fields = json.loads(config.read_text(encoding="utf-8")) | {"num_hidden_layers": layers}
            (model / "config.json").write_text(json.dumps(fields), encoding="utf-8")
            starts["cold"].append(_spawn(model, cache, disabled, await_ops=True))
            starts["warm"].append(_spawn(model, cache, disabled))
            shutil.rmtree(cache / "programs")
            starts["warm ops"].append(_spawn(model, cache, disabled))
    return {"layers": layers, **starts}


def _spawn(model: Path, cache: Path, disabled: Sequence[str], *, await_ops: bool = False) -> Start:
    command = [sys.executable, "-m", "bench.start_up", "--child", str(model)]
    command += [f"--disable-pass={name}" for name in disabled]
    command += ["--await-ops"] if await_ops else []
    environment = {**os.environ, "LLMC_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [*command, "--since", str(time.time())],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=_BUILD_LIMIT_S,
    )
    start: Start = json.loads(done.stdout.splitlines()[-1])
    return start


def _start(model: Path, since: float, disabled: Sequence[str], await_ops: bool) -> Start:
    """In the child: seconds of each phase to the first token, and since the process was created."""
    parts = {"interpreter": time.time() - since}
    before = time.time()
    from llmc.config import EngineConfig
    from llmc.engine.messages import AddRequest
    from llmc.sampling_params import SamplingParams
    from llmc.startup.start import start_engine

    parts["imports"] = time.time() - before
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        max_model_len=2048,
        max_num_seqs=32,
        passes=dict.fromkeys(disabled, False),
    )
    started = start_engine(config)
    details = {phase.name: phase.detail for phase in started.phases}
    parts |= {phase.name: phase.seconds for phase in started.phases}
    before = time.time()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = list(range(1, 1 + _PROMPT_TOKENS))
    started.engine.add(AddRequest(request_id="0", prompt_token_ids=prompt, sampling=params))
    while not any(update.new_token_ids for update in started.engine.step()):
        pass
    parts["first step"] = time.time() - before
    total = time.time() - since
    ops = None
    if await_ops:
        from llmc.kernels.cpu.build import load, start_build

        build = start_build()
        while not build.done:
            time.sleep(0.1)
        ops = time.time() - since if load() else None
    return {"total_s": total, "parts_s": parts, "details": details, "ops_ready_s": ops}


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """One row per kind of start: medians of the rounds, in seconds."""
    for result in results:
        for kind in KINDS:
            starts = result[kind]
            total = statistics.median(s["total_s"] for s in starts)
            parts = {
                name: statistics.median(s["parts_s"].get(name, 0.0) for s in starts)
                for name in starts[-1]["parts_s"]
            }
            said = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
            ready = starts[-1]["ops_ready_s"]
            later = f"; C++ ops ready at {ready:.1f}" if ready else ""
            print(f"{result['layers']:3d} layers {kind:8s} {total:6.1f} s: {said}{later}")
            print(f"           {starts[-1]['details']['compile']}")


if __name__ == "__main__":
    main()
