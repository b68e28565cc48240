"""`python -m bench.prompts`: what it takes from a GPU's result, and how the table is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_package import ROOT

from bench.prompts import merged, shapes
from llmc.kernels.prompt_table import OWN, Measured
from llmc.kernels.prompts import MIN_TOKENS


def line(chip: str, **ms: float) -> Measured:
    return Measured(chip=chip, head_dim=128, tokens=2048, is_fresh=True, ms=ms)


def test_a_run_replaces_the_lines_of_its_chip() -> None:
    empty: dict[str, Any] = {"measured": [], "lines": []}
    first = merged(empty, [line("sm_90", triton=2.0, flash=1.0)], {"chip": "sm_90", "date": "a"})
    other = merged(first, [line("sm_100", triton=2.0, cudnn=1.0)], {"chip": "sm_100", "date": "b"})
    again = merged(
        other,
        [line("sm_90", triton=1.0, flash=3.0), line("sm_90", triton=1.0)],
        {"chip": "sm_90", "date": "c"},
    )
    assert [run["date"] for run in again["measured"]] == ["b", "c"]
    assert [(one["chip"], one["ms"]) for one in again["lines"]] == [
        ("sm_100", {"triton": 2.0, "cudnn": 1.0}),
        ("sm_90", {"triton": 1.0, "flash": 3.0}),
    ], "a line that compares nothing is left out"
    assert [Measured(**one).fastest for one in again["lines"]] == ["cudnn", OWN]


def test_every_shape_is_a_prompt() -> None:
    found = list(shapes())
    assert len(set(found)) == len(found) > 20
    assert min(shape.tokens for shape in found) >= MIN_TOKENS


def test_the_result_of_a_lease_becomes_a_table(tmp_path: Path) -> None:
    measured = {"chip": "sm_90", "head_dim": 128, "tokens": 2048, "is_fresh": True}
    data = {
        "run": {"chip": "sm_90", "machine": {}, "date": "2026-01-01", "versions": {}},
        "lines": {
            "128 x 2048, fresh": {**measured, "ms": {"triton": 2.0, "cudnn": 1.0}},
            "128 x 8192, fresh": {"error": "RuntimeError: out of memory", "where": ""},
            "seconds": {"128 x 2048, fresh": 0.5},
        },
    }
    (tmp_path / "gpu.json").write_text(json.dumps({"parts": {"prompts": {"data": data}}}))
    output = tmp_path / "table.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.prompts", "--take", str(tmp_path / "gpu.json"),
         "--output", str(output)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = json.loads(output.read_text())
    ours = [one for one in table["lines"] if one["chip"] == "sm_90"]
    assert ours == [{**measured, "ms": {"triton": 2.0, "cudnn": 1.0}}]
    assert data["run"] in table["measured"]
