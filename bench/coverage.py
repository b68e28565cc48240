"""Checks which transformers classes llmc serves, and whether it gives the same answers.

    python -m bench.coverage [--only TYPE ...] [--jobs 2] [--time-limit 240]
    python -m bench.coverage --table docs/coverage.md

Every decoder-only class gets a tiny random checkpoint and a separate process, with limits on time
and memory. Mixed batches run whole, in chunks, and with preemption, in float32 at -O0; greedy
tokens and their log-probabilities must equal those of transformers' eager `generate`.

A row records its sources (`sources_digest`). Without --only, classes whose row is missing or from
other sources are run. One row per class is kept in bench/results/coverage.jsonl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
RESULTS = _ROOT / "bench" / "results" / "coverage.jsonl"
TIME_LIMIT_S = 240
_SOURCES = (
    "bench/configs",
    "kernels",
    "llmc/compiler",
    "llmc/engine",
    "llmc/runner",
    "llmc/startup",
    "llmc/weights",
    "passes",
    "tests/support/tiny_configs.py",
)


def read_results(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The row of every class."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["type"]: row for row in rows}


@cache
def sources_digest() -> str:
    """A digest of what determines a class's answers: our sources, configurations, and versions."""
    hasher = hashlib.sha256()
    paths = [path for name in _SOURCES for path in (_ROOT / name, *(_ROOT / name).rglob("*"))]
    for path in sorted(path for path in paths if path.suffix in (".py", ".cpp", ".h", ".json")):
        hasher.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    for name in ("torch", "transformers"):
        hasher.update(version(name).split("+")[0].encode() + b"\0")
    return hasher.hexdigest()[:8]


def check(model_type: str, time_limit_s: int = TIME_LIMIT_S) -> dict[str, Any]:
    """The row of one class; a process that dies or hangs also gives a row."""
    start = time.perf_counter()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.coverage_case"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_case, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(time_limit_s):
            row = json.loads(ours.recv_bytes())
        else:
            row = _failed(model_type, f"took longer than {time_limit_s} s")
    except EOFError:
        process.join()
        row = _failed(model_type, f"the process ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()
    seconds = round(time.perf_counter() - start, 1)
    return row | {"total_seconds": seconds, "sources": sources_digest()}


def _run_case(model_type: str, answer: Any) -> None:
    from bench.coverage_case import send_row

    send_row(model_type, answer)


def _failed(model_type: str, reason: str) -> dict[str, Any]:
    return {"type": model_type, "stage": "config", "parity": False, "reason": reason}


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The matrix as Markdown, one line per class."""
    lines = [
        "| class | model type | transformers runs it | served | same answers | sources | remark |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        stages = ("config", "transformers", "served")
        reached = stages.index(row["stage"])
        marks = ["yes" if ok else "no" for ok in (reached >= 1, reached >= 2, row["parity"])]
        reason = row["reason"].replace("|", "\\|")[:220]
        cells = [row.get("class", ""), row["type"], *marks, row["sources"], reason]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def summary(rows: Iterable[dict[str, Any]]) -> str:
    runnable = [r for r in rows if r["stage"] != "config"]
    right = [r for r in runnable if r["parity"]]
    wrong = [r for r in runnable if r["stage"] == "served" and not r["parity"]]
    return (
        f"{len(right)} of {len(runnable)} decoder-only classes that transformers runs are served "
        f"with the same answers ({len(right) / max(len(runnable), 1):.0%}); "
        f"{len(runnable) - len(right) - len(wrong)} are refused, {len(wrong)} differ"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="model types; default: all that are stale")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--time-limit", type=int, default=TIME_LIMIT_S, metavar="SECONDS", help="per class"
    )
    parser.add_argument("--table", type=Path, help="write the matrix into this file")
    args = parser.parse_args()
    if args.table is None:
        run(args.only or stale_types(), args.jobs, args.time_limit)
    else:
        write_table(args.table)
    print(summary(read_results().values()))


def stale_types() -> list[str]:
    """The classes without a row from these sources."""
    from bench.coverage_case import tiny_configs

    rows = read_results()
    types = tiny_configs.decoder_types()
    return [name for name in types if rows.get(name, {}).get("sources") != sources_digest()]


def run(types: Sequence[str], jobs: int, time_limit_s: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = read_results()
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda name: check(name, time_limit_s), types):
            rows[row["type"]] = row
            lines = [json.dumps(rows[name]) + "\n" for name in sorted(rows)]
            RESULTS.write_text("".join(lines), encoding="utf-8")
            state = "same" if row["parity"] else row["stage"]
            print(f"{row['type']:28} {state:14} {row['total_seconds']:6} s  {row['reason'][:150]}")


def write_table(path: Path) -> None:
    """Between `<!-- matrix -->` and `<!-- end -->`."""
    rows = sorted(read_results().values(), key=lambda r: str(r["type"]))
    text = path.read_text(encoding="utf-8")
    head, rest = text.split("<!-- matrix -->")
    tail = rest.split("<!-- end -->")[1]
    body = f"<!-- matrix -->\n\n{summary(rows)}.\n\n{table(rows)}\n<!-- end -->"
    path.write_text(head + body + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
