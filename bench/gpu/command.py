"""Runs `python -m bench.gpu`: arguments, order of the parts, and time limits.

    python -m bench.gpu [--part NAME[,NAME]] [--list] [--output-json FILE] [--seconds 530] [--tiny]

Parts run in separate processes: `smoke` first, then the other untimed ones concurrently, then the
others one at a time. The result file is updated atomically whenever a part has a result, so an
interrupted run keeps all measurements. Logs, test reports and traces are kept in a folder beside
it (gpu.json: gpu-files/). A run ends by itself within `--seconds`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import report, settings
from bench.gpu.parts import Part, choose
from bench.gpu.process import PartProcess
from bench.gpu.record import Record, failure, finite
from llmc.cache_dir import cache_dir
from llmc.load_test.machine import describe_machine, package_versions
from llmc.load_test.report import context, write_json

_LAST_S = 5.0  # reserved for the end of the run itself
_LEAST_S = 15.0  # no part is started with less time left


def main() -> None:
    args = _arguments()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
    if args.list:
        for part in choose(None):
            print(f"{part.name:10} ~{part.expected_s:3} s  {part.about}")
    elif args.child:
        _child(args.child, args.child_output)
    elif args.warm_job:
        from bench.gpu.start_parts import run_warm_job

        print(run_warm_job(settings.full(), args.warm_job))
    else:
        started = time.monotonic()
        result = {**_result(), "tiny": args.tiny}
        run = _here if args.tiny else _in_processes
        run(choose(args.part), result, args.output_json, started + args.seconds)
        print(report.text(result))
        _write(args.output_json, result)


def _arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=lines[0])
    parser.add_argument("--part", help="only these parts, separated by commas")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--output-json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=530, help="time limit of the run")
    parser.add_argument("--tiny", action="store_true", help="run everything in miniature, on a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--warm-job", help=argparse.SUPPRESS)
    return parser.parse_args()


def _result() -> dict[str, Any]:
    return {
        **context(),
        "versions": package_versions(),
        "machine": describe_machine(),
        "parts": {},
    }


def _write(path: Path, result: dict[str, Any]) -> None:
    write_json(path, finite(result))


def _child(name: str, output: Path) -> None:
    (part,) = choose(name)
    record = Record(output)
    part.load()(settings.full(), record)
    record.save()


def files_of(path: Path) -> Path:
    """The folder, made if it isn't there, of the files that the parts keep beside the result."""
    folder = path.with_name(f"{path.stem}-files")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _here(parts: Sequence[Part], result: dict[str, Any], path: Path, deadline: float) -> None:
    """Run the parts in this process, one after another (for --tiny)."""
    small = settings.tiny()
    folder = files_of(path)
    for part in parts:
        print(f"== {part.name}: {part.about}", flush=True)
        start, record = time.monotonic(), Record(folder / f"{part.name}.json")
        found: dict[str, Any] = {"status": "ok", "data": record.data}
        try:
            part.load()(small, record)
        except Exception as error:  # a part that can't start is a result too
            found |= {"status": "failed", "error": failure(error)["error"]}
        found["seconds"] = round(time.monotonic() - start, 1)
        result["parts"][part.name] = found
        _write(path, result)


def in_groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts that run at the same time, in order."""
    first = [part for part in parts if part.name == "smoke"]
    untimed = [part for part in parts if not part.timed and part not in first]
    timed = [[part] for part in parts if part.timed]
    return [group for group in (first, untimed, *timed) if group]


def _in_processes(
    parts: Sequence[Part], result: dict[str, Any], path: Path, deadline: float
) -> None:
    folder = files_of(path)
    for group in in_groups(parts):
        left = deadline - time.monotonic() - _LAST_S
        if left < _LEAST_S:
            for part in group:
                result["parts"][part.name] = {"status": "no time", "seconds": 0.0, "data": {}}
            continue
        running = []
        for part in group:
            print(f"== {part.name}: {part.about} (at most {min(left, part.most_s):.0f} s)")
            running.append(PartProcess(part, folder, min(left, part.most_s)))
        _follow(running, result, path)


def _follow(running: list[PartProcess], result: dict[str, Any], path: Path) -> None:
    """Wait for all parts; their results are written every second."""
    try:
        while True:
            over = [process.poll() for process in running]
            for process in running:
                result["parts"][process.part.name] = process.result()
            _write(path, result)
            if all(over):
                break
            time.sleep(1)
    finally:
        for process in running:
            process.stop()
    for process in running:
        found = result["parts"][process.part.name]
        print(process.log()[-4000:])
        print(f"   {process.part.name}: {found['status']}, {found['seconds']} s", flush=True)
