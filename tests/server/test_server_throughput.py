"""The line in the server's log: what it counts, when it is silent, and that a server writes it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from live_server import live_server

from llmc.engine.messages import EngineStats
from llmc.server import run
from llmc.server.throughput import log_throughput, throughput_line


def stats(**values: int) -> EngineStats:
    zeros = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    return EngineStats(**{**zeros, "num_blocks": 40, "num_free_blocks": 40, **values})


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


@pytest.mark.parametrize("field", ["num_running", "num_waiting", "num_prompt_tokens",
                                   "num_generated_tokens"])  # fmt: skip
def test_only_an_idle_server_is_silent(field: str) -> None:
    idle = stats()
    assert throughput_line(idle, idle, 10.0) is None
    assert throughput_line(idle, stats(**{field: 1}), 10.0) is not None


def test_a_server_logs_its_throughput_and_then_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def often(read: Any) -> Any:
        return log_throughput(read, interval_s=0.05)

    monkeypatch.setattr(run, "log_throughput", often)
    caplog.set_level(logging.INFO, logger="llmc.server.throughput")

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "llmc.server.throughput"]

    with live_server() as live:
        assert live.complete().status_code == 200
        live.wait_idle()
        deadline = time.monotonic() + 10
        while not lines() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.15)  # what was still to be told has been told
        told = len(lines())
        time.sleep(0.3)
        assert 1 <= told == len(lines())
    assert lines()[0].startswith("Avg prompt throughput: ")
