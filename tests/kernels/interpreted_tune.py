"""bench.tune under Triton's interpreter: which options it finds, refuses and writes.

Times are made up from the options in use; the kernels and their results are real.
Run by test_ops_triton.py, for the same reason as interpreted_ops.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import version
from math import log2
from pathlib import Path
from typing import Any

import bench_package  # noqa: F401 - makes `bench` importable
import fast_interpreter  # noqa: F401 - the tests take a fraction of the time
import pytest
import torch
from shared_captures import sharing  # noqa: F401 - in all formats, a model is the same
from tiny_configs import tiny_config
from triton.runtime.errors import OutOfResources

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from bench import linear_work, option_search, tune, tuned_table
from bench.clock import Timing
from bench.kernel_work import Maker, Work
from bench.option_search import Found
from bench.program_work import program_work
from bench.tuned_table import make_line, write_lines
from llmc.kernels import tuned
from llmc.kernels.prompts import PromptConfig, prompt_config
from llmc.kernels.quantized_linear import Format
from llmc.kernels.registry import OPS
from llmc.kernels.triton import launch
from llmc.kernels.triton.linear_configs import LinearTiles, few_rows_config, few_rows_tiles
from llmc.kernels.tuned import FUNCTIONS, Key

CPU = torch.device("cpu")
SHAPE = (64, 96, 2, False)  # channels, depth, bytes per weight, gated
Cost = Callable[[LinearTiles], float]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One weight per call, and no kernel known not to compile."""
    monkeypatch.setattr(linear_work, "_COLD_BYTES", 0)
    monkeypatch.setattr(launch, "_uncompilable", {})
    monkeypatch.delenv("LLMC_TUNED", raising=False)
    tuned.load_table.cache_clear()
    yield
    tuned.load_table.cache_clear()


def asked_by(*rows: int, **options: Any) -> dict[Key, list[Work]]:
    """What linears of so many rows ask for."""
    depth, channels = SHAPE[1], SHAPE[0]
    makers = (partial(linear_work.linear_work, n, depth, channels, **options) for n in rows)
    return tune.asked_options(makers)


def priced(patch: pytest.MonkeyPatch, key: Key, cost: Cost) -> None:
    """Every call takes the `cost` of the options that it would use."""

    def time_call(run: Any, device: torch.device, *, budget_s: float) -> Timing:
        return Timing(seconds=cost(tuned.load_table().get(key, key[2])), how="calls")

    patch.setattr(tune, "time_call", time_call)


def searched(patch: pytest.MonkeyPatch, rows: int, cost: Cost, seconds: float = 600) -> Found:
    [(key, works)] = asked_by(rows).items()
    priced(patch, key, cost)
    return option_search.search(key, tune.Calls(works), time.monotonic() + seconds)


def test_the_search_descends_to_the_fastest_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(tiles: LinearTiles) -> float:
        away = abs(log2(tiles.block_n / 64)), abs(tiles.num_stages - 3), abs(log2(tiles.waves / 8))
        return 1 + sum(away)

    found = searched(monkeypatch, 4, cost)
    chosen = few_rows_tiles.rule(4, *SHAPE)
    assert found.key == ("few_rows_tiles", SHAPE, chosen)
    assert found.options == replace(chosen, block_n=64, num_stages=3, waves=8)
    assert found.is_faster and not found.failed
    assert list(found.before.values()) == [5.0] and list(found.after.values()) == [1.0]
    assert list(found.before) == ["fused_linear: 4 x 96 -> 64"]
    assert "block_n 16 -> 64, num_stages 4 -> 3, waves 4 -> 8" in str(found)


def test_little_is_not_worth_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = searched(monkeypatch, 4, lambda tiles: 1 + 0.02 * (tiles.block_n == 16))
    assert found.options.block_n != 16 and not found.is_faster
    assert "(not kept)" in str(found)
    noise = searched(monkeypatch, 4, lambda tiles: 1 + 0.005 * (tiles.block_n == 16))
    assert noise.options == noise.key[2]


def test_no_call_may_become_slower_for_the_others() -> None:
    def found(after: Sequence[float]) -> Found:
        before = {"a": 1.0, "b": 1.0}
        times = dict(zip(before, after, strict=True))
        key: Key = ("few_rows_tiles", SHAPE, few_rows_tiles.rule(1, *SHAPE))
        return Found(key=key, options=key[2], before=before, after=times, num_tried=1, failed={})

    assert found((0.8, 1.02)).is_faster and not found((0.8, 1.1)).is_faster


def test_options_of_other_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows fit in tiles of 8, and tiles of 4 leave half of them out."""
    monkeypatch.setattr(few_rows_tiles, "_fixed", ())
    found = searched(monkeypatch, 8, lambda tiles: tiles.block_m)
    assert found.options == replace(found.key[2], block_m=8)
    [(options, why)] = found.failed.items()
    assert "block_m=4" in options and "another result than the right one" in why


def test_results_that_are_not_written_are_not_those_of_the_call_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poisoned = []

    def call() -> torch.Tensor:
        poisoned.append(bool(torch.empty(3).isnan().all()))
        return torch.ones(3)

    work = Work(op="fused_linear", case="", run=partial(call))
    monkeypatch.setattr(OPS["fused_linear"], "reference", lambda: torch.ones(3))
    tune.Calls([work]).check()
    monkeypatch.setattr(OPS["fused_linear"], "reference", lambda: torch.ones(3) * 1.03)
    with pytest.raises(RuntimeError, match="another result"):
        tune.Calls([work]).check()
    assert poisoned == [True, True] and not torch.are_deterministic_algorithms_enabled()


def test_fixed_options_are_not_tried() -> None:
    chosen = few_rows_tiles.rule(8, *SHAPE)
    tried = list(option_search.neighbours(few_rows_tiles, chosen, chosen))
    assert len(set(tried)) == len(tried) == 10 and {one.block_m for one in tried} == {16}
    attention = FUNCTIONS["attention_config"]
    rule = attention.rule(4, 128, 2, 2, False)
    tried = list(option_search.neighbours(attention, rule, rule))
    assert len(tried) == 18 and not any(one.descriptors or one.warp_specialize for one in tried)


def test_options_that_cannot_be_compiled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op would run its reference instead."""
    queue = launch.Launch._queue

    def refused(self: launch.Launch) -> None:
        if self.constants["BLOCK_N"] > 16:
            raise OutOfResources(300_000, 232_448, "shared memory")
        queue(self)

    monkeypatch.setattr(launch.Launch, "_queue", refused)
    found = searched(monkeypatch, 4, lambda tiles: 1 / tiles.block_n)
    assert found.options == found.key[2] and not found.is_faster
    [(options, why)] = found.failed.items()
    assert "block_n=32" in options and "OutOfResources" in why


def test_the_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = searched(monkeypatch, 4, lambda tiles: 1 / tiles.block_n, seconds=-1)
    assert found.num_tried == 0 and found.options == found.key[2]


def test_calls_that_ask_alike_are_tuned_together() -> None:
    both = asked_by(2, 16)
    [works] = both.values()
    assert [work.case for work in works] == ["2 x 96 -> 64", "16 x 96 -> 64"]
    assert len(asked_by(1, 2)) == 2, "one row is multiplied otherwise"
    assert asked_by(17) == {}, "the library multiplies so many"


def program(path: Path, formats: Sequence[Format], **sizes: int) -> Iterator[Maker]:
    """The work of a model with routed experts."""
    tiny_config("qwen3_moe", moe_intermediate_size=32, **sizes).save_pretrained(path)
    return program_work(tune.model_configs([str(path)], formats), CPU, tune.TINY)


def test_a_programs_calls_ask_for_all_that_can_be_tuned(tmp_path: Path) -> None:
    asked = tune.asked_options(program(tmp_path, ("int4", "fp8")))
    assert {key[0] for key in asked} == set(FUNCTIONS) - {"prompt_config"}
    ops = {work.op for works in asked.values() for work in works}
    assert ops == {
        "fused_linear", "quantized_linear", "fused_quantized_linear", "rope_attention", "route",
        "expert_linear",
        "sum_expert_linear", "quantized_expert_linear", "sum_quantized_expert_linear",
    }  # fmt: skip
    for works in asked.values():
        cases = [f"{work.op}: {work.case}" for work in works]
        assert len(set(cases)) == len(cases), "each has its own time"
        for work in works[:2]:
            tune.Calls([work]).check()


@pytest.mark.exhaustive
def test_with_all_options_that_are_tried_kernels_compute_the_same(tmp_path: Path) -> None:
    """A line is for more calls than those that were measured."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    int5 = (partial(linear_work.low_bit_work, "int5", n, 256, 256) for n in (1, 2, 40))
    makers = (*program(tmp_path, ("int4", "fp8"), **sizes), *int5)
    num_checked = 0
    for key, works in tune.asked_options(makers).items():
        works = list({work.op: work for work in works}.values())
        calls = tune.Calls(works)
        tried = {as_interpreted(key[2])}
        for options in option_search.neighbours(FUNCTIONS[key[0]], key[2], key[2]):
            if as_interpreted(options) not in tried:
                with tune.using({key: options}):
                    calls.check()
                    num_checked += len(works)
            tried.add(as_interpreted(options))
    assert num_checked > 200


def as_interpreted(options: Any) -> Any:
    """Without those that only the compiler reads."""
    names = {field.name for field in fields(options)} & {"num_stages", "num_warps"}
    return replace(options, **dict.fromkeys(names, 0))


def test_what_was_found_is_what_kernels_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = asked_by(1, 4)
    few = next(key for key in asked if key[2].block_m == 16)
    priced(monkeypatch, few, lambda tiles: 16 / tiles.block_n)
    path = tmp_path / "tuned.json"
    other = prompt_config.key((128,), prompt_config.rule(128))
    line = make_line(other, PromptConfig(min_tokens=1000), {})
    write_lines(path, {other: line})
    found = list(tune.tune(asked, path, 600))
    assert [one.is_faster for one in found] == [False, True]
    lines = json.loads(path.read_text())["lines"]
    assert [one["function"] for one in lines] == ["prompt_config", "few_rows_tiles"]
    assert lines[1]["measured"]["after_s"] == {"fused_linear: 4 x 96 -> 64": 16 / 256}
    assert lines[1]["versions"]["torch"] == version("torch")
    monkeypatch.setenv("LLMC_TUNED", str(path))
    tuned.load_table.cache_clear()
    assert few_rows_config(8, *SHAPE, 3).tiles == found[1].options != few[2]
    assert prompt_config(128).min_tokens == 1000
    priced(monkeypatch, few, lambda tiles: tiles.block_n)  # now the code's options are best
    monkeypatch.setattr(option_search, "neighbours", lambda *args: [])
    assert len(list(tune.tune(asked, path, 600))) == 2
    assert [one["function"] for one in json.loads(path.read_text())["lines"]] == ["prompt_config"]
    assert "no time is left" not in capsys.readouterr().out
    assert list(tune.tune(asked, path, -1)) == []
    assert "no time is left for 2 of 2" in capsys.readouterr().out


def test_calls_and_searches_that_fail_leave_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    working = partial(linear_work.linear_work, 1, SHAPE[1], SHAPE[0])
    [key] = tune.asked_options([broken, working])
    assert "left out: RuntimeError: CUDA out of memory" in capsys.readouterr().out
    asked = asked_by(4, 1)
    search = option_search.search

    def searched_or_not(wanted: Key, *rest: Any, **options: Any) -> Found:
        return search(wanted, *rest, **options) if wanted == key else broken()

    monkeypatch.setattr(option_search, "search", searched_or_not)
    priced(monkeypatch, key, lambda tiles: 1 / tiles.block_n)
    assert [found.key for found in tune.tune(asked, tmp_path / "tuned.json", 600)] == [key]
    assert "failed: RuntimeError: CUDA out of memory" in capsys.readouterr().out


def test_a_table_of_another_device_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    key = prompt_config.key((128,), prompt_config.rule(128))
    line = make_line(key, PromptConfig(min_tokens=1000), {})
    write_lines(path, {key: line})
    assert json.loads(path.read_text())["lines"] == [line]
    monkeypatch.setattr(tuned, "device_name", lambda: "another")
    monkeypatch.setattr(tuned_table, "device_name", lambda: "another")
    write_lines(path, {})
    assert json.loads(path.read_text()) == {"version": 1, "device": "another", "lines": []}
