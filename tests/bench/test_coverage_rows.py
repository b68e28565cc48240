"""docs/coverage.md is the measured rows, none of which is wrong or much older than the others."""

from __future__ import annotations

from pathlib import Path

import bench_package  # noqa: F401
import pytest
import tiny_configs
import transformers as tf

from bench.coverage import read_results, summary, table

DOCS = Path(__file__).parents[2] / "docs" / "coverage.md"


def test_every_class_has_a_row() -> None:
    assert set(tiny_configs.decoder_types()) - set(read_results()) == set()


def test_nothing_else_has_a_row() -> None:
    others = set(read_results()) - set(tiny_configs.decoder_types())
    assert others & set(tf.CONFIG_MAPPING) == set()
    if others:  # a row that is too old fails below
        pytest.skip(f"this transformers does not know {', '.join(sorted(others))}")


def test_no_class_answers_otherwise_than_transformers() -> None:
    served = [row for row in read_results().values() if row["stage"] == "served"]
    assert [row["type"] for row in served if not row["parity"]] == []


def test_rows_are_of_the_last_two_runs_at_most() -> None:
    assert len({row["sources"] for row in read_results().values()}) <= 2


def test_the_table_is_made_of_them() -> None:
    rows = sorted(read_results().values(), key=lambda row: str(row["type"]))
    text = DOCS.read_text(encoding="utf-8")
    assert table(rows) in text and summary(rows) in text
