"""The line in the server's log: what it counts, when it is silent, and that a server writes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from live_server import live_server

from llmc.engine.messages import EngineStats
from llmc.server import run
from llmc.server.throughput import log_throughput, throughput_line


def stats(**values: int) -> EngineStats:
    zeros = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    return EngineStats(
        **{**zeros, "step_sizes": (), "num_blocks": 40, "num_free_blocks": 40, **values}
    )


def test_the_line_counts_what_came_between() -> None:
    before = stats(num_prompt_tokens=100, num_generated_tokens=10)
    after = stats(
        num_prompt_tokens=350,
        num_generated_tokens=45,
        num_running=3,
        num_waiting=2,
        num_free_blocks=30,
        prefix_cache_queries=200,
        prefix_cache_hits=25,
    )
    assert throughput_line(before, after, 10.0) == (
        "Avg prompt throughput: 25.0 tokens/s, Avg generation throughput: 3.5 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 12.5%"
    )


def test_the_line_says_why_steps_had_no_cuda_graph() -> None:
    before = stats(num_steps=100, num_eager_not_captured=7, num_eager_images=2)
    after = stats(
        num_steps=140,
        num_running=1,
        num_eager_not_captured=8,
        num_eager_images=2,
        num_eager_long_prompts=3,
        num_eager_too_large=1,
    )
    line = throughput_line(before, after, 10.0)
    assert line is not None and line.endswith(
        "0.0%, Steps without CUDA graph: 5 of 40 (not captured: 1, long prompts: 3, too large: 1)"
    )
    again = throughput_line(after, after, 10.0)
    assert again is not None and "CUDA graph" not in again


@pytest.mark.parametrize("field", ["num_running", "num_waiting", "num_prompt_tokens",
                                   "num_generated_tokens"])  # fmt: skip
def test_only_an_idle_server_is_silent(field: str) -> None:
    idle = stats()
    assert throughput_line(idle, idle, 10.0) is None
    assert throughput_line(idle, stats(**{field: 1}), 10.0) is not None


def test_a_server_logs_its_throughput_and_then_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_reads = 0

    def often(read: Callable[[], EngineStats]) -> Any:
        def counted() -> EngineStats:
            nonlocal num_reads
            num_reads += 1
            return read()

        return log_throughput(counted, interval_s=0.02)

    def wait_for_reads(count: int) -> None:
        wanted, deadline = num_reads + count, time.monotonic() + 20
        while num_reads < wanted:
            assert time.monotonic() < deadline, "nothing is read any more"
            time.sleep(0.01)

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "llmc.server.throughput"]

    monkeypatch.setattr(run, "log_throughput", often)
    caplog.set_level(logging.INFO, logger="llmc.server.throughput")
    with live_server() as live:
        assert live.complete().status_code == 200
        live.wait_idle()
        wait_for_reads(3)  # what was still to be logged has been logged
        num_lines = len(lines())
        wait_for_reads(5)
        assert 1 <= num_lines == len(lines())
    assert lines()[0].startswith("Avg prompt throughput: ")
