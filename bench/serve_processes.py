"""Compares one process with two: `llmc serve --no-engine-process` and `llmc serve`, alternating.

    python -m bench.serve_processes [--rounds 3] [--modes one,two,two+1,two/8] [--clients 1,32]
                                    [--model DIR] [--load-format dummy] [--output-json FILE]

Modes: one process; two; two plus one more API process; two with 8 tokens per event. Each round
starts a fresh server per mode and sends it the load of `llmc bench serve`: random prompts, streamed
answers, from one client and then from 32. The client runs on the same machine and uses part of it.
Medians over the rounds are printed; all samples are in the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmc.load_test.client import Target
from llmc.load_test.machine import describe_machine, package_versions
from llmc.load_test.metrics import RequestTrace, compute_metrics
from llmc.load_test.prompts import random_prompts
from llmc.load_test.report import context, write_json
from llmc.load_test.serving import Load, find_model, run_load
from llmc.load_test.workloads import BenchRequest

MODES = {
    "one": ("--no-engine-process",),
    "two": (),
    "two+1": ("--api-workers", "2"),
    "two/8": ("--stream-interval", "8"),
}
SHOWN = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
START_S = 300.0


def main() -> None:
    args = _arguments()
    samples: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for _ in range(args.rounds):
        for mode in args.modes:
            for clients, found in measure(mode, args).items():
                samples.setdefault(mode, {}).setdefault(clients, []).append(found)
    print_table(samples)
    if args.output_json:
        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        write_json(args.output_json, {**facts, "model": args.model, "samples": samples})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--clients", type=numbers, default=(1, 32))
    parser.add_argument("--modes", type=_modes, default=("one", "two"))
    parser.add_argument("--requests-per-client", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _modes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in MODES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(MODES)}")
    return names


def measure(mode: str, args: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """The figures of one fresh server, by number of clients."""
    words = [*MODES[mode], "--load-format", args.load_format, "--no-access-log"]
    if args.model is not None:
        words += ["--model", args.model]
    with serving(words) as url:
        return {clients: asyncio.run(_load(url, clients, args)) for clients in args.clients}


async def _load(url: str, clients: int, args: argparse.Namespace) -> dict[str, Any]:
    target = await find_target(url)
    count = clients * args.requests_per_client
    requests = await random_prompts(
        target,
        num_prompts=count + clients,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=0.0,
        prefix_len=0,
        seed=clients,
        tokenizer=None,
    )
    traces, seconds = await answered(target, requests[count:], requests[:count], clients)
    failed = [trace.error for trace in traces if trace.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed; the first: {failed[0]}")
    metrics = compute_metrics(traces, seconds, percentiles=[50.0, 99.0], goodput_ms={})
    return {**metrics.as_json(), "duration_s": seconds}


async def find_target(url: str) -> Target:
    model = await find_model(Target(base_url=url), START_S)
    return Target(base_url=url, model=model, ignore_eos=True, temperature=0.0)


async def answered(
    target: Target, first: Sequence[BenchRequest], requests: Sequence[BenchRequest], clients: int
) -> tuple[list[RequestTrace], float]:
    """The traces of `requests`, and the seconds they took; `first` warm the server up, all at
    once."""
    load = Load(max_concurrency=clients)
    await run_load(target, load, first)
    return await run_load(target, load, requests)


@contextlib.contextmanager
def serving(words: Sequence[str]) -> Iterator[str]:
    """Run `llmc serve` with these flags on a free port; yields its URL once it responds."""
    command = [sys.executable, "-P", "-m", "llmc.cli", "serve", "--port", "0", *words]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(command, stderr=stderr, cwd=folder, env=dict(os.environ))
        try:
            yield _url(process, log, workers="--api-workers" in words)
        finally:
            process.terminate()
            process.wait(60)


def _url(process: subprocess.Popen[bytes], log: Path, *, workers: bool) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        text = log.read_text()
        found = re.search(r"URL +(http://\S+)", text)
        if found and (not workers or "api-1 is ready" in text):
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")


def print_table(samples: dict[str, dict[int, list[dict[str, Any]]]]) -> None:
    print(f"{'':16} {'clients':>7} " + " ".join(f"{name:>18}" for name in SHOWN))
    for mode, by_clients in samples.items():
        for clients, found in by_clients.items():
            medians = [statistics.median(one[name] for one in found) for name in SHOWN]
            print(f"{mode:16} {clients:7} " + " ".join(f"{value:18.2f}" for value in medians))


if __name__ == "__main__":
    main()
