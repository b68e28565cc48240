"""Which classes of transformers llmc serves, and whether it answers as transformers does.

    python -m bench.coverage [--only TYPE ...] [--jobs 2] [--redo] [--time-limit 240]
    python -m bench.coverage --table docs/coverage.md

Every decoder-only class gets a tiny random checkpoint and a separate process, with a limit of
time and memory. Mixed batches run whole, in chunks, and with preemption, in float32 at -O0; greedy
tokens and their log-probabilities must be those of transformers' eager `generate`. Results are
appended to bench/results/coverage.jsonl, one line a class, so that a run can be continued.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
RESULTS = _ROOT / "bench" / "results" / "coverage.jsonl"
TIME_LIMIT_S = 240


def read_results(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The last line of every class."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["type"]: row for row in rows}


def check(model_type: str, time_limit_s: int = TIME_LIMIT_S) -> dict[str, Any]:
    """The row of one class; a process that dies or hangs makes a row too."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "bench.coverage_case", model_type]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=time_limit_s,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        reason = f"the process ended with status {done.returncode}: {done.stderr.strip()[-200:]}"
        row = json.loads(lines[-1]) if lines else _failed(model_type, reason)
    except subprocess.TimeoutExpired:
        row = _failed(model_type, f"took longer than {time_limit_s} s")
    return row | {"total_seconds": round(time.perf_counter() - start, 1)}


def _failed(model_type: str, reason: str) -> dict[str, Any]:
    return {"type": model_type, "stage": "config", "parity": False, "reason": reason}


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The matrix as Markdown, one line a class."""
    lines = [
        "| class | model type | transformers runs it | served | same answers | remark |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        stages = ("config", "transformers", "served")
        reached = stages.index(row["stage"])
        marks = ["yes" if ok else "no" for ok in (reached >= 1, reached >= 2, row["parity"])]
        reason = row["reason"].replace("|", "\\|")[:220]
        lines.append(f"| {row.get('class', '')} | {row['type']} | {' | '.join(marks)} | {reason} |")
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
    parser.add_argument("--only", nargs="+", help="model types; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--redo", action="store_true", help="also those that have a result")
    parser.add_argument(
        "--time-limit", type=int, default=TIME_LIMIT_S, metavar="SECONDS", help="of one class"
    )
    parser.add_argument("--table", type=Path, help="write the matrix into this file")
    args = parser.parse_args()
    if args.table is None:
        run(args.only, args.jobs, args.redo, args.time_limit)
    else:
        write_table(args.table)
    print(summary(read_results().values()))


def run(only: list[str] | None, jobs: int, redo: bool, time_limit_s: int) -> None:
    sys.path.insert(0, str(_ROOT / "tests" / "support"))
    import tiny_configs

    done = read_results()
    wanted = [t for t in only or tiny_configs.decoder_types() if redo or only or t not in done]
    with ThreadPoolExecutor(jobs) as pool, RESULTS.open("a", encoding="utf-8") as out:
        for row in pool.map(lambda name: check(name, time_limit_s), wanted):
            out.write(json.dumps(row) + "\n")
            out.flush()
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
