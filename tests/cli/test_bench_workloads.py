"""Workloads: same seed, same requests; lengths of the right distribution; files read or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.cli.bench_options import Workload
from llmc.errors import ConfigError
from llmc.load_test.prompts import WORDS, random_texts
from llmc.load_test.serving import Load, departure_times
from llmc.load_test.workloads import (
    BenchRequest,
    load_dataset,
    random_lengths,
    random_workload,
    text_workload,
)


def make_workload(**changes: object) -> list[BenchRequest]:
    arguments: dict[str, object] = {
        "num_prompts": 50,
        "input_len": 20,
        "output_len": 10,
        "token_ids": range(100, 200),
        "range_ratio": 0.5,
        "seed": 3,
    }
    return random_workload(**{**arguments, **changes})  # type: ignore[arg-type]


def test_same_seed_same_workload() -> None:
    assert make_workload() == make_workload()
    assert make_workload() != make_workload(seed=4)


def test_fixed_lengths_without_a_range() -> None:
    requests = make_workload(range_ratio=0.0)
    assert {r.prompt_len for r in requests} == {20}
    assert {r.output_len for r in requests} == {10}


def test_lengths_fill_their_range_evenly() -> None:
    lengths = random_lengths(20, 0.5, 6000, np.random.default_rng(0))
    counts = np.bincount(lengths, minlength=31)
    assert counts[:10].sum() == 0 and len(counts) == 31
    # 21 values, about 286 each: 5 standard deviations are about 83.
    assert all(abs(count - 6000 / 21) < 90 for count in counts[10:])


def test_tokens_come_from_the_given_ids_and_prompts_differ() -> None:
    requests = make_workload()
    tokens = {token for r in requests for token in r.token_ids or ()}
    assert tokens <= set(range(100, 200)) and len(tokens) > 90
    assert len({r.token_ids for r in requests}) == 50
    assert all(r.prompt_len == len(r.token_ids or ()) for r in requests)


def test_common_prefix_comes_on_top() -> None:
    requests = make_workload(prefix_len=7, range_ratio=0.0)
    assert {r.prompt_len for r in requests} == {27}
    assert len({(r.token_ids or ())[:7] for r in requests}) == 1
    assert len({(r.token_ids or ())[:8] for r in requests}) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"range_ratio": 1.0}, r"\[0, 1\), got 1.0"),
        ({"range_ratio": -0.1}, "range ratio"),
        ({"input_len": 0}, "length of random prompts must be at least 1, got 0"),
        ({"output_len": 0}, "output length must be at least 1, got 0"),
        ({"prefix_len": -1}, "common prefix must be at least 0, got -1"),
        ({"num_prompts": 0}, "number of prompts"),
    ],
)
def test_impossible_workloads_are_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"num_prompts": 1, "input_len": None, "output_len": None}
    fields |= {"range_ratio": 0.0, "prefix_len": 0, "dataset": None, "seed": 0}
    Workload(**fields)
    with pytest.raises(ConfigError, match=message):
        Workload(**{**fields, **changes})


def test_random_texts_use_the_measured_ratio() -> None:
    texts = random_texts(num_prompts=3, input_len=30, output_len=5, tokens_per_word=1.5)
    assert [len((r.text or "").split()) for r in texts] == [20, 20, 20]
    assert set((texts[0].text or "").split()) <= set(WORDS)


def test_jsonl_dataset(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [
        {"prompt": "hello there", "output_len": 5},
        {"prompt_token_ids": [1, 2, 3], "output_tokens": 6},
        {"prompt": [4, 5], "output_len": 7},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert load_dataset(path, count_tokens=len) == [
        BenchRequest(text="hello there", prompt_len=11, output_len=5),
        BenchRequest(token_ids=(1, 2, 3), prompt_len=3, output_len=6),
        BenchRequest(token_ids=(4, 5), prompt_len=2, output_len=7),
    ]
    assert [r.output_len for r in load_dataset(path, output_len=9, num_prompts=2)] == [9, 9]


def test_sharegpt_dataset(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    talks = [
        {"conversations": [{"value": f"question {i:04d}"}, {"value": "x" * 40}]} for i in range(9)
    ]
    talks.append({"conversations": [{"value": "alone"}]})
    talks.append({"conversations": [{"value": "hi"}, {"value": "short"}]})
    path.write_text(json.dumps(talks))
    requests = load_dataset(path, seed=1)
    assert len(requests) == 9 and {r.output_len for r in requests} == {10}
    assert requests == load_dataset(path, seed=1) != load_dataset(path, seed=2)
    counted = load_dataset(path, count_tokens=len, num_prompts=4)
    assert [(r.prompt_len, r.output_len) for r in counted] == [(13, 40)] * 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no usable prompt"),
        ("{", "line 1: not valid JSON"),
        ("[1]", "record 1: expected an object"),
        ('{"prompt": "x"}', "record 1: needs an `output_len`"),
        ('{"output_len": 3}', "record 1: needs a `prompt`"),
        ('{"prompt": [1, "a"], "output_len": 3}', "token ids must be integers"),
    ],
)
def test_bad_datasets_say_where(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_dataset(path)


def test_missing_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the dataset .*No such file"):
        load_dataset(tmp_path / "none.json")


def test_all_at_once_without_a_rate() -> None:
    assert departure_times(Load(), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 50.0])
def test_departures_keep_the_rate_and_the_burstiness(burstiness: float) -> None:
    load = Load(request_rate=10.0, burstiness=burstiness, seed=5)
    times = departure_times(load, 4000)
    assert times == departure_times(load, 4000)
    assert times == sorted(times) and math.isclose(times[-1], 400.0)
    gaps = np.diff([0.0, *times])
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.15)


def test_text_is_pythons_documentation_and_never_the_same_twice() -> None:
    requests = text_workload(num_prompts=3000, output_len=9, seed=1)
    texts = [r.text or "" for r in requests]
    assert len(set(texts)) == 3000 and {r.output_len for r in requests} == {9}
    assert min(map(len, texts)) >= 80 and max(map(len, texts)) <= 2010
    assert len({len(t) for t in texts}) > 100, "lengths are natural"
    assert requests == text_workload(num_prompts=3000, output_len=9, seed=1)
    assert requests[:5] != text_workload(num_prompts=5, output_len=9, seed=2)
