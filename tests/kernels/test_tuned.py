"""Tables of measured launch options: what they change, and that no file can do harm."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "triton", reason="triton is not installed: most of the options are its kernels'"
)

from llmc.kernels import tuned
from llmc.kernels.prompts import MIN_TOKENS, prompt_config
from llmc.kernels.triton import chosen_attention, configs, fused_linear
from llmc.kernels.triton.linear_configs import (
    few_rows_config,
    few_rows_tiles,
    low_bit_config,
    low_bit_tiles,
    wide_config,
)
from llmc.kernels.tuned import FUNCTIONS, Tuned

DECODE = (4, 128, 2, 2, False)


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No table of this machine, and none of this file afterwards."""
    monkeypatch.delenv("LLMC_TUNED", raising=False)
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(tuned, "device_name", lambda: "NVIDIA H100 80GB HBM3")
    tuned.load_table.cache_clear()
    yield
    tuned.load_table.cache_clear()


def line(function: Tuned[*tuple[Any, ...], Any], *args: Any, **options: Any) -> dict[str, Any]:
    """A line with the code's options for these arguments, but for `options`."""
    chosen = asdict(function.rule(*args))
    shape = {name: args[i] for name, i in function.shape.items()}
    return {
        "function": function.name,
        "arguments": shape,
        "chosen": chosen,
        "options": {**chosen, **options},
        "figures": "are not read",
    }


def table(*lines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"version": 1, "device": tuned.device_name(), "lines": list(lines), **fields}


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Writes the table that LLMC_TUNED names."""

    def write(content: object) -> None:
        path = tmp_path / "named.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv("LLMC_TUNED", str(path))
        tuned.load_table.cache_clear()

    return write


def test_without_a_table_the_code_chooses(caplog: pytest.LogCaptureFixture) -> None:
    assert configs.attention_config(*DECODE) == configs.attention_config.rule(*DECODE)
    assert few_rows_config(1, 4096, 4096, 2, False, 132).tiles == few_rows_tiles.rule(
        1, 4096, 4096, 2, False
    )
    assert tuned.load_table() == {} and not caplog.records


def test_a_line_is_for_the_numbers_of_rows_for_which_the_code_chooses_alike(use: Any) -> None:
    use(table(line(configs.attention_config, *DECODE, block_n=128, descriptors=True)))
    choose, rule = configs.attention_config, configs.attention_config.rule
    for rows in (1, 4, 16):
        found = choose(rows, *DECODE[1:])
        assert found == replace(rule(*DECODE), block_n=128, descriptors=True)
    for other in ((17, 128, 2, 2, False), (4, 64, 2, 2, False), (4, 128, 2, 1, False)):
        assert choose(*other) == rule(*other), "another class of rows, head size or cache"


def test_linears_are_split_by_the_measured_tiles(use: Any) -> None:
    shape = (4000, 4096, 2, False)
    use(table(line(few_rows_tiles, 1, *shape, block_n=32, waves=2)))
    found = few_rows_config(1, *shape, 132)
    assert (found.tiles.block_n, found.tiles.waves) == (32, 2)
    assert found.splits == 2, "as many programs as two waves take"
    assert few_rows_config(2, *shape, 132).tiles == few_rows_tiles.rule(2, *shape)


def test_each_function_reads_its_lines(use: Any) -> None:
    experts = {
        configs.expert_config: (8, 128, 2),
        configs.low_bit_expert_config: (8, 128, 2),
        configs.scaled_expert_config: (8, 128, 128, 2048),
    }
    lines = [line(function, *args, num_stages=6) for function, args in experts.items()]
    lines += [
        line(low_bit_tiles, 8, 14336, 4096, 8, 2, False, num_stages=6),
        line(prompt_config, 128, min_tokens=1000),
        line(wide_config, 8, 2, False, min_rows=512),
    ]
    use(table(*lines))
    assert {one["function"] for one in lines} | {"attention_config", "few_rows_tiles"} == set(
        FUNCTIONS
    )
    for function, args in experts.items():
        assert function(*args).num_stages == 6 != function.rule(*args).num_stages
    assert low_bit_config(16, 14336, 4096, 8, 132, 2).tiles.num_stages == 6
    assert wide_config(8, 2, False).min_rows == 512 and wide_config(4, 2, False).min_rows == 256
    assert prompt_config(128).min_tokens == 1000 and prompt_config(64).min_tokens == MIN_TOKENS


def test_options_reach_the_kernels_that_were_measured_and_no_others(use: Any) -> None:
    """Attention to chosen keys is another kernel."""
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device="meta")
    weight = torch.zeros(64, 64, dtype=torch.bfloat16, device="meta")
    given = (x, weight, None, None, None, 0.0, None, None)
    query = torch.zeros(3, 2, 64, dtype=torch.bfloat16, device="meta")
    cache = torch.zeros(4, 1, 16, 64, dtype=torch.bfloat16, device="meta")
    ints = torch.zeros(2, 2, dtype=torch.int32, device="meta")
    keys = torch.zeros(3, 1, 8, dtype=torch.int32, device="meta")
    chosen = (query, cache, cache, ints[0], ints[1, :1], ints, keys, 1, 1.0, 0.0, None)

    def constants() -> list[dict[str, Any]]:
        plans = fused_linear.plan(*given), chosen_attention.plan(*chosen)
        return [plan.launches[0].constants for plan in plans]

    before = constants()
    attention = line(configs.attention_config, 16, 64, 2, 2, False, block_n=32)
    use(table(line(few_rows_tiles, 1, 64, 64, 2, False, block_n=4), attention))
    linear, *others = constants()
    assert (before[0]["BLOCK_N"], linear["BLOCK_N"]) == (8, 4) and others == before[1:]


CODE = line(configs.attention_config, *DECODE)
BROKEN: dict[str, Any] = {
    "no JSON": "{",
    "no object": [],
    "another version": table(CODE, version=2),
    "another device": table(CODE, device="NVIDIA H200"),
    "no lines": {"version": 1, "device": tuned.device_name()},
    "lines of another type": table(lines=3),
    "an unknown function": table({**CODE, "function": "attention"}),
    "no function": table({"options": {}}),
    "other arguments": table({**CODE, "arguments": {"dim": 128}}),
    "a list as an argument": table({**CODE, "arguments": {**CODE["arguments"], "dim": [128]}}),
    "no arguments": table({**CODE, "arguments": 3}),
    "an unknown field": table(line(configs.attention_config, *DECODE, block_k=64)),
    "a field that is missing": table({**CODE, "options": {"block_n": 64}}),
    "no fields": table({**CODE, "options": [64]}),
    "text": table(line(configs.attention_config, *DECODE, block_n="64")),
    "a fraction": table(line(configs.attention_config, *DECODE, block_n=64.0)),
    "a flag as a number": table(line(configs.attention_config, *DECODE, num_warps=True)),
    "a number as a flag": table(line(configs.attention_config, *DECODE, descriptors=1)),
    "a tile that is no power of two": table(line(configs.attention_config, *DECODE, block_n=48)),
    "warps that are no power of two": table(line(configs.attention_config, *DECODE, num_warps=3)),
    "zero": table(line(configs.attention_config, *DECODE, block_m=0)),
    "rows left out": table(line(few_rows_tiles, 4, 64, 64, 2, False, block_m=4)),
    "units cut": table(line(low_bit_tiles, 4, 64, 64, 4, 2, False, block_k=16)),
    "units of experts cut": table(line(configs.low_bit_expert_config, 8, 8, 2, block_k=16)),
    "groups joined": table(
        line(configs.scaled_expert_config, 8, 8, 64, 128, block_k=128)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_table_that_does_not_fit_is_reported_once_and_the_code_chooses(
    name: str, use: Any, caplog: pytest.LogCaptureFixture
) -> None:
    content = BROKEN[name]
    if isinstance(content, dict) and name != "another device":
        content = {**content, "device": tuned.device_name()}
    other = line(prompt_config, 128, min_tokens=1000)  # right, but the file as a whole is not used
    if isinstance(content, dict) and isinstance(content.get("lines"), list):
        content = {**content, "lines": [other, *content["lines"]]}
    use(content)
    for _ in range(2):
        assert configs.attention_config(*DECODE) == configs.attention_config.rule(*DECODE)
        assert prompt_config(128) == prompt_config.rule(128)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "named.json is not used" in record.getMessage()


def test_what_the_code_itself_chooses_can_stay(use: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Zero means something to some options: many rows are not split."""
    use(table(line(low_bit_tiles, 100, 4096, 4096, 8, 2, False, num_warps=4)))
    found = low_bit_config(100, 4096, 4096, 8, 132, 2).tiles
    assert (found.waves, found.num_warps) == (0, 4) and not caplog.records


def test_a_missing_file_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LLMC_TUNED", str(tmp_path / "none.json"))
    assert configs.attention_config(*DECODE) == configs.attention_config.rule(*DECODE)
    assert "none.json is not used" in caplog.text and "FileNotFoundError" in caplog.text


def test_a_device_has_the_table_that_llmc_brings_and_another_can_be_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use: Any
) -> None:
    own = tmp_path / "nvidia-h100-80gb-hbm3.json"
    own.write_text(json.dumps(table(line(prompt_config, 128, min_tokens=300))))
    assert prompt_config(128).min_tokens == 300
    own.unlink()
    assert prompt_config(128).min_tokens == 300, "it is read once"
    use(table(line(prompt_config, 128, min_tokens=400)))
    assert prompt_config(128).min_tokens == 400
    monkeypatch.setenv("LLMC_TUNED", "")
    tuned.load_table.cache_clear()
    assert prompt_config(128).min_tokens == MIN_TOKENS
