"""Offline benchmarks on a scripted engine: every token is timed, decode steps are distinguished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import make_scripted, scripted_info

from llmc.cli import bench_run
from llmc.cli.main import main
from llmc.errors import InvalidRequestError
from llmc.load_test import machine
from llmc.load_test.offline import (
    DecodeSteps,
    check_fits,
    run_offline,
    usable_token_ids,
)
from llmc.load_test.workloads import BenchRequest, random_workload
from llmc.sampling_params import SamplingParams

FULL_LENGTH = SamplingParams(ignore_eos=True)


def make_requests(count: int, *, output_len: int = 6) -> list[BenchRequest]:
    return random_workload(
        num_prompts=count, input_len=10, output_len=output_len, token_ids=range(5, 300)
    )


def test_every_token_of_every_request_is_timed() -> None:
    scripted = make_scripted(max_num_seqs=4)
    finished: list[None] = []
    run = run_offline(
        scripted.engine, make_requests(10), FULL_LENGTH, lambda: finished.append(None)
    )
    assert len(finished) == len(run.traces) == 10
    assert not scripted.engine.has_work
    for trace in run.traces:
        assert trace.error is None
        assert (trace.prompt_tokens, trace.output_tokens) == (10, 6)
        assert list(trace.token_times_s) == sorted(trace.token_times_s)
        assert 0 < trace.ttft_s < trace.e2el_s <= run.duration_s


def test_decode_steps_of_one_batch() -> None:
    scripted = make_scripted(max_num_seqs=4)
    run = run_offline(scripted.engine, make_requests(4, output_len=6), FULL_LENGTH)
    # One step for the prompts, then five in which all four draw a token.
    assert run.decode.num_steps == 5
    assert run.decode.num_tokens == 20
    assert run.decode.context_tokens == 4 * sum(10 + drawn for drawn in range(1, 6))
    assert 0 < run.decode.seconds < run.duration_s


def test_a_failed_request_is_a_failed_trace() -> None:
    scripted = make_scripted()
    scripted.runner.nan_word = "<s>"
    good, bad = make_requests(1)[0], BenchRequest(token_ids=(0,), prompt_len=1, output_len=4)
    run = run_offline(scripted.engine, [good, bad], FULL_LENGTH)
    assert run.traces[0].error is None
    assert run.traces[1].error is not None


def test_bytes_and_share_of_bandwidth() -> None:
    info = scripted_info(weight_bytes=1000, kv_bytes_per_token=10)
    decode = DecodeSteps(num_steps=4, seconds=2.0, num_tokens=8, context_tokens=50)
    assert decode.bytes_read(info) == 4 * 1000 + 50 * 10
    assert decode.share_of_bandwidth(info, 9000.0) == pytest.approx(4500 / 2.0 / 9000)
    assert decode.mean_ms == pytest.approx(500.0)
    assert DecodeSteps().share_of_bandwidth(info, 9000.0) is None


def test_a_workload_that_can_not_fit_is_refused() -> None:
    info = scripted_info(max_model_len=16)
    check_fits(make_requests(2, output_len=6), info)
    with pytest.raises(InvalidRequestError, match="10 prompt and 7 output tokens exceeds .* 16"):
        check_fits(make_requests(2, output_len=7), info)


def test_prompts_hold_no_end_token() -> None:
    info = scripted_info(vocab_size=10, eos_token_ids=(1, 9))
    assert usable_token_ids(info) == [0, 2, 3, 4, 5, 6, 7, 8]


def test_read_bandwidth_is_plausible() -> None:
    measured = machine.measure_read_bandwidth("cpu", repeats=2, max_bytes=2**24)
    assert 1e8 < measured < 1e13


@pytest.fixture
def engine_of_script(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The benchmarks get a scripted engine; the list holds it once it is made."""
    made: list[Any] = []

    def load(config: Any, console: Any) -> Any:
        made.append(make_scripted(max_num_seqs=config.max_num_seqs, weight_bytes=1000))
        return made[-1]

    monkeypatch.setattr(bench_run, "load_engine", load)
    monkeypatch.setattr(machine, "measure_read_bandwidth", lambda device: 1e9)
    return made


def test_throughput_command(
    engine_of_script: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    words = "--num-prompts 6 --random-input-len 10 --random-output-len 8 --random-range-ratio 0.5"
    more = ["--max-num-seqs", "4", "--output-json", str(path)]
    assert main(["bench", "throughput", *words.split(), *more]) == 0
    out = capsys.readouterr().out
    assert "Throughput: " in out and " requests/s, " in out and " output tokens/s" in out
    assert "Share reached by decoding (%):" in out and "Peak memory (MiB):" in out
    result = json.loads(path.read_text())
    assert result["num_requests"] == result["completed"] == 6
    assert 6 * 4 <= result["total_output_tokens"] <= 6 * 12
    total = result["total_input_tokens"] + result["total_output_tokens"]
    assert result["total_num_tokens"] == total
    assert result["tokens_per_second"] == pytest.approx(total / result["elapsed_time"])
    assert result["engine_config"]["max_num_seqs"] == 4
    assert result["decode_bandwidth_share"] > 0 and result["peak_rss_bytes"] > 0


def test_latency_command(
    engine_of_script: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    words = ["--batch-size", "2", "--input-len", "5", "--output-len", "4", "--num-iters", "3",
             "--num-iters-warmup", "1", "--output-json", str(path)]  # fmt: skip
    assert main(["bench", "latency", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Avg latency: ") and "99% percentile latency: " in out
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert engine_of_script[0].engine.stats().num_finished == 4 * 2
    assert engine_of_script[0].engine.stats().prefix_cache_hits == 0


def test_dataset_of_token_ids_needs_no_tokenizer(
    engine_of_script: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.jsonl"
    words = ["bench", "throughput", "--dataset-path", str(path), "--num-warmups", "0"]
    path.write_text('{"prompt_token_ids": [7, 8, 9], "output_len": 3}\n')
    assert main(words) == 0
    assert engine_of_script[0].engine.stats().num_generated_tokens == 3
    path.write_text('{"prompt": "text", "output_len": 3}\n')
    assert main(words) == 2
    assert "has no tokenizer" in capsys.readouterr().err
