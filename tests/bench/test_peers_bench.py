"""`python -m bench.peers`: what every engine is given, and how its times are shown."""

from __future__ import annotations

import bench_package  # noqa: F401 - before bench
import pytest

from bench.peer_engines import ENGINES
from bench.peers import DECODE_TOKENS, KINDS, jobs, print_table


def test_all_engines_get_the_same_ids() -> None:
    todo = jobs(vocab_size=1000)
    assert todo == jobs(vocab_size=1000)
    assert {"llmc", "llama.cpp", "transformers"} <= {*ENGINES}
    assert KINDS == ("decode", "decode-4096", "prefill-128", "prefill-1024", "mixed")
    for kind, length in (("decode", 16), ("decode-4096", 4096)):
        one, answer = todo[f"{kind}: one token"], todo[f"{kind}: answer"]
        assert one.prompts == answer.prompts and [*map(len, one.prompts)] == [length]
        assert answer.num_tokens == [one.num_tokens[0] + DECODE_TOKENS]
    for length in (128, 1024):
        job = todo[f"prefill-{length}"]
        assert [len(prompt) for prompt in job.prompts] == [length] and job.num_tokens == [1]
    assert len(todo["mixed"].prompts) == len(todo["mixed"].num_tokens) == 32
    assert len({*todo["mixed"].num_tokens}) > 5 < len({*map(len, todo["mixed"].prompts)})


def test_medians_are_beside_the_limit_of_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        {
            "file": "x.gguf",
            "weight_bytes": 100e6,
            "bandwidth_bytes_per_s": [10e9, 20e9, 90e9],
            "settings": {"llmc": "float32", "llama.cpp": "2 threads"},
            "seconds": {
                "llmc": {"decode": [0.009, 0.01, 0.5], "mixed": [2.0, 2.0, 2.0]},
                "llama.cpp": {"decode": [0.015, 0.03, 0.014], "mixed": [1.0, 1.0, 1.0]},
            },
        }
    )
    out = capsys.readouterr().out
    assert "100 MB of weights, read bandwidth 20.0 GB/s" in out
    assert "llmc 10.0 ms, llama.cpp 15.0 ms (1.50 x llmc's)" in out
    assert "llmc 2000.0 ms, llama.cpp 1000.0 ms (0.50 x llmc's)" in out
    assert "decode reads the file's weights at 50% of the bandwidth" in out
