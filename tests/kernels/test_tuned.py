"""The committed table of launch options: what it may hold, and that configurations read it."""

from __future__ import annotations

import dataclasses
import json
from unittest import mock

import pytest

pytest.importorskip("triton", reason="triton is not installed: nothing reads the table")

import bench_package  # noqa: F401 - makes `bench` importable

from bench.tune import Found, merged
from llmc.kernels.triton import configs, linear_configs, tuned
from llmc.kernels.triton.configs import AttentionConfig, GemmConfig
from llmc.kernels.triton.linear_configs import LinearTiles

KINDS = {
    "paged_attention": AttentionConfig,
    "fused_linear": LinearTiles,
    "quantized_linear": LinearTiles,
    "expert_linear": GemmConfig,
}


def test_the_committed_table_is_what_a_benchmark_writes() -> None:
    data = json.loads(tuned.TABLE.read_text(encoding="utf-8"))
    assert set(data) == {"measured", "lines"}
    chips = {run["chip"] for run in data["measured"]}
    for line in data["lines"]:
        assert line["chip"] in chips and line["ms"] < line["default_ms"]
        fields = {f.name for f in dataclasses.fields(KINDS[line["kernel"]])}
        assert set(line["options"]) <= fields
        assert all(isinstance(n, int) and n > 0 for n in line["options"].values())
    assert len(tuned.load_table()) == len(data["lines"])


def test_a_line_changes_its_class_on_its_chip_alone() -> None:
    lines = {
        ("sm_90", "paged_attention", "16 rows, 128 wide, 2 of 2 bytes"): {"block_n": 128},
        ("sm_90", "fused_linear", "1 row, 2 bytes, 4096 -> 4096"): {"block_n": 32, "waves": 2},
        ("sm_90", "quantized_linear", "16 rows, 8 a word, 2 bytes, 4096 -> 16384"): {
            "num_stages": 5
        },
        ("sm_90", "expert_linear", "more rows each, 2 bytes"): {"block_k": 32},
    }
    with mock.patch.object(tuned, "load_table", lambda: lines):
        for chip, block_n in (("sm_90", 128), ("sm_100", 64), ("", 64)):
            assert configs.attention_config(4, 128, 2, 2, chip).block_n == block_n
        assert configs.attention_config(17, 128, 2, 2, "sm_90").block_n == 64
        assert configs.attention_config(4, 64, 2, 2, "sm_90").block_n == 64
        assert configs.attention_config(4, 128, 2, 1, "sm_90").block_n == 64
        row = linear_configs.few_rows_config(1, 4000, 4096, 2, 132, "sm_90")
        assert (row.tiles.block_n, row.tiles.waves) == (32, 2)
        assert row.splits == 2, "as many programs as two waves want"
        assert linear_configs.few_rows_config(2, 4000, 4096, 2, 132, "sm_90").tiles.block_n == 16
        low = linear_configs.low_bit_config(8, 14336, 4096, 8, 132, 2, "sm_90")
        assert low.tiles.num_stages == 5
        assert configs.expert_config(8193, 128, 2, "sm_90").block_k == 32
        assert configs.expert_config(64, 128, 2, "sm_90").block_k == 128


def test_a_run_replaces_what_it_sought() -> None:
    def found(shape: str, options: dict[str, int] | None) -> Found:
        return Found(
            key=("sm_90", "fused_linear", shape), options=options, ms=1, default_ms=2, tried=3,
            failed=(),
        )  # fmt: skip

    first = merged(
        {"measured": [], "lines": []}, [found("a", {"block_n": 4}), found("b", None)], {}
    )
    assert [(line["shape"], line["options"]) for line in first["lines"]] == [("a", {"block_n": 4})]
    again = merged(first, [found("b", {"block_n": 8})], {})
    assert [line["shape"] for line in again["lines"]] == ["a", "b"]
    gone = merged(again, [found("a", None)], {})
    assert [line["shape"] for line in gone["lines"]] == ["b"]
    assert len(gone["measured"]) == 3
