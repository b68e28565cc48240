"""`llmc_cpu::linear` beside torch's linears, in turn and with cold weights.

    python -m bench.linear_cpu [--shapes 1024x6144,...] [--rows 1,4,...] [--threads 2]
                               [--seconds 1.5] [--output-json FILE]

Weights of one shape rotate through more memory than the caches hold. The contestants alternate in
short turns, so that a busy machine slows all of them; the least time of a turn and the median are
both given. `plain` is F.linear; `packed` is oneDNN's linear over a weight reordered at load.
`--threads 1` counts the thread's own CPU time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import llmc.kernels.cpu  # noqa: F401
from llmc.kernels.cpu.build import load
from llmc.load_test.machine import (
    describe_machine,
    measure_read_bandwidth,
    package_versions,
)
from llmc.load_test.report import context, write_json

SHAPES = "1024x4096,2048x1024,1024x6144,3072x1024,1024x151936"
ROWS = "1,2,4,8,16,32,64,128,256,1024"
COLD_BYTES = 600e6
TURN_SECONDS = 0.02
Run = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Milliseconds a call; the rates are those of the least time."""

    depth: int
    channels: int
    rows: int
    contestant: str
    min_ms: float
    median_ms: float
    gb_per_s: float
    gflop_per_s: float


def main() -> None:
    args = _arguments()
    if not load():
        raise SystemExit("error: the C++ ops can't be built here")
    torch.set_num_threads(args.threads)
    bandwidth = measure_read_bandwidth("cpu")
    print(f"{args.threads} threads, read bandwidth {bandwidth / 1e9:.1f} GB/s")
    print(f"{'K x N':>13} {'rows':>5}  contestant: min ms, median ms, GB/s of weight, GFLOP/s")
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    results: list[Result] = []
    for shape in args.shapes.split(","):
        depth, channels = (int(n) for n in shape.split("x"))
        rows = [int(n) for n in args.rows.split(",")]
        results += measure_shape(depth, channels, rows, args.seconds, clock)
    if args.output_json:
        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        fields = {"threads": args.threads, "read_bandwidth": bandwidth}
        write_json(args.output_json, {**facts, **fields, "results": [*map(asdict, results)]})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default=SHAPES, help="KxN, comma-separated")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="per shape and row count")
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args()


def contestants(weights: list[Tensor]) -> dict[str, Run]:
    """name -> run(x, i) with the i-th weight."""
    found: dict[str, Run] = {
        "llmc": lambda x, i: torch.ops.llmc_cpu.linear(x, weights[i], None),
        "plain": lambda x, i: F.linear(x, weights[i]),
    }
    ops = torch.ops.mkldnn
    try:
        packed = [ops._reorder_linear_weight(w) for w in weights]
    except (AttributeError, RuntimeError) as error:  # no oneDNN, or not for this dtype on this CPU
        print(f"no packed linear: {str(error).splitlines()[0]}")
    else:
        found["packed"] = lambda x, i: ops._linear_pointwise(x, packed[i], None, "none", [], "")
    return found


def measure_shape(
    depth: int, channels: int, rows: list[int], seconds: float, clock: Callable[[], float]
) -> list[Result]:
    weight = (torch.randn(channels, depth) * depth**-0.5).bfloat16()
    copies = max(2, int(COLD_BYTES / (weight.numel() * 2)) + 1)
    runs = contestants([weight.clone() for _ in range(copies)])
    results = []
    for count in rows:
        x = torch.randn(count, depth).bfloat16()
        times = _take_turns(runs, x, copies, seconds, clock)
        found = [_result(depth, channels, count, name, taken) for name, taken in times.items()]
        print(f"{depth:>5} x {channels:<6}{count:>5}  " + "   ".join(map(_text, found)), flush=True)
        results += found
    return results


def _take_turns(
    runs: dict[str, Run], x: Tensor, copies: int, seconds: float, clock: Callable[[], float]
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    runs["plain"](x, 0)
    calls = max(1, min(copies, int(TURN_SECONDS / (time.perf_counter() - start))))
    turn = 0
    while turn < 3 or time.perf_counter() - start < seconds:
        for name, run in runs.items():
            begin = clock()
            for i in range(calls):
                run(x, (turn * calls + i) % copies)
            times[name].append((clock() - begin) / calls * 1e3)
        turn += 1
    return times


def _result(depth: int, channels: int, rows: int, name: str, times: list[float]) -> Result:
    best = min(times)
    return Result(
        depth=depth,
        channels=channels,
        rows=rows,
        contestant=name,
        min_ms=best,
        median_ms=statistics.median(times),
        gb_per_s=2 * depth * channels / best / 1e6,
        gflop_per_s=2 * rows * depth * channels / best / 1e6,
    )


def _text(result: Result) -> str:
    return (
        f"{result.contestant}: {result.min_ms:.3f} {result.median_ms:.3f} "
        f"{result.gb_per_s:.1f} {result.gflop_per_s:.0f}"
    )


if __name__ == "__main__":
    main()
