"""docs/coverage.md is the measured rows, none of which is wrong or much older than the others."""

from __future__ import annotations

from pathlib import Path

import bench_package  # noqa: F401
import tiny_configs

from bench.coverage import read_results, summary, table

DOCS = Path(__file__).parents[2] / "docs" / "coverage.md"


def test_every_class_has_a_row_and_no_other() -> None:
    assert sorted(read_results()) == sorted(tiny_configs.decoder_types())


def test_no_class_answers_otherwise_than_transformers() -> None:
    served = [row for row in read_results().values() if row["stage"] == "served"]
    assert [row["type"] for row in served if not row["parity"]] == []


def test_rows_are_of_the_last_two_runs_at_most() -> None:
    assert len({row["sources"] for row in read_results().values()}) <= 2


def test_the_table_is_made_of_them() -> None:
    rows = sorted(read_results().values(), key=lambda row: str(row["type"]))
    text = DOCS.read_text(encoding="utf-8")
    assert table(rows) in text and summary(rows) in text
