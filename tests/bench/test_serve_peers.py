"""bench.serve_peers: both servers start, and make the tokens they are asked for."""

from __future__ import annotations

from argparse import Namespace

import bench_package  # noqa: F401 - before bench
import pytest

from llmc.startup.default_model import default_model_path

pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: llama.cpp can't be compared")

from bench import serve_peers
from bench.serve_peers import SERVERS, measure, random_requests


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_peers, "INPUT_LEN", 16)
    monkeypatch.setattr(serve_peers, "OUTPUT_LEN", 8)
    found = measure(name, default_model_path(), 2, Namespace(requests_per_client=1))
    # llama.cpp's server may close a connection that is about to be used again
    assert found["completed"] + len(found["errors"]) == 2 and found["completed"] > 0
    assert found["total_output_tokens"] == 8 * found["completed"]
    assert found["output_throughput"] > 0 and found["median_ttft_ms"] > 0


def test_all_servers_get_the_same_prompts() -> None:
    first, again = (random_requests(default_model_path(), 3) for _ in range(2))
    assert first == again and len({request.token_ids for request in first}) == 3
