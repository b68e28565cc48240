"""`python -m bench.ablations`: every row in miniature, and how figures become a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if any(find_spec(name) is None for name in ("httpx", "uvicorn", "zmq")):
    pytest.skip("the server's dependencies are not installed", allow_module_level=True)

from bench_package import ROOT

from bench.ablations.memory import contiguous, paged
from bench.ablations.model import PASSES
from bench.ablations.row import Figures, Row, computed, in_turn
from bench.ablations.table import ROWS, choose, markdown


def row(better: str = "lower") -> Row:
    return Row(
        name="x",
        what="thing",
        on="new",
        off="old",
        unit="ms",
        model="none",
        better="higher" if better == "higher" else "lower",
        measure=lambda _: computed(1, 2, ""),
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_row_works_in_miniature(tmp_path: Path) -> None:
    # Two servers are half a minute on a busy machine; tests/e2e/test_soak.py starts one. So is
    # Inductor, which tests/parity/test_compiled_parity.py runs. The rows of single passes differ in
    # a name only, and references take seconds a token.
    left_out = {"processes", "opt-level", "kernels", *(f"pass-{name}" for name in PASSES[1:])}
    names = [row.name for row in ROWS if row.name not in left_out]
    output, text = tmp_path / "table.json", tmp_path / "table.md"
    command = [sys.executable, "-m", "bench.ablations", "--tiny", "--row", ",".join(names)]
    done = subprocess.run(
        [*command, "--output-json", str(output), "--output-md", str(text)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = json.loads(output.read_text())["rows"]
    assert [row["name"] for row in rows] == names
    for found in rows:
        assert found["ratio"] > 0 and found["on"]["samples"] and found["off"]["samples"], found
    counted = {found["name"]: found["ratio"] for found in rows}
    assert counted["paged-fit"] > 2 and counted["paged-waste"] > 2 and counted["copy-on-write"] > 4
    notes = {found["name"]: found["note"] for found in rows}
    # how many of them were swapped follows from measured times, which are a busy machine's here
    assert " 0 preemptions" not in notes["swap"] and " swapped; without" in notes["swap"]
    assert "0 of 0 draft tokens" not in notes["speculation"]
    assert len(text.read_text().splitlines()) == len(names) + 2


def test_a_ratio_says_how_many_times_better() -> None:
    figures = Figures(on=[1.0, 2.0, 90.0], off=[8.0, 6.0, 1.0])
    assert row("lower").ratio(figures) == 3.0
    assert row("higher").ratio(figures) == pytest.approx(1 / 3)
    assert row().ratio(computed(0, 4, "")) == float("inf")


def test_both_take_turns() -> None:
    said: list[str] = []

    def say(word: str) -> float:
        said.append(word)
        return float(len(said))

    figures = in_turn(lambda: say("on"), lambda: say("off"), 2)
    assert said == ["on", "off"] * 3
    assert (figures.on, figures.off) == ([3.0, 5.0], [4.0, 6.0])


def test_the_table_has_a_line_for_each_row() -> None:
    found = row().as_json(computed(0.5, 150.0, "note"), 1.0)
    assert markdown([found]).splitlines()[2] == (
        "| thing | 0.5 (new) | 150 (old) | 300.00 | ms "
        "| none; note; `python -m bench.ablations --row x` |"
    )


def test_names_are_unique_and_an_unknown_one_is_answered() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) and choose(None) == ROWS
    assert [row.name for row in choose(["swap", "async"])] == ["swap", "async"]
    with pytest.raises(ValueError, match="no row 'swop'; the rows are detokenize, "):
        choose(["swop"])


def test_paging_wastes_less_than_a_block_a_request() -> None:
    with_blocks, whole = paged(80), contiguous(80)
    assert whole.running <= 16 and with_blocks.running > 2 * whole.running
    assert 0 < with_blocks.wasted < 0.15 and 0.5 < whole.wasted < 1
