"""Linears of other kinds beside the bfloat16 one: low-bit weights, and routed experts at decode.

    python -m bench.linears [--threads 2] [--seconds 1.0] [--rows 1,8,64] [--shapes KxN,...]
                            [--output-json FILE]

Weights of one shape rotate through more memory than the caches hold, and the contestants alternate.
Given are the least time of a call, the bytes of weight that it reads a second, and their share of
the read bandwidth measured in the same run. `--threads 1` counts the thread's own CPU time, which
other processes disturb less. Experts: 8 of 128 picked by each row, as in a routed layer of 2048
inputs and 768 channels; only the picked ones are counted, and read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import llmc.kernels.cpu  # noqa: F401
from llmc.kernels.cpu.build import load
from llmc.kernels.cpu.pages import empty_in_huge_pages
from llmc.kernels.quantized_linear import FORMATS, quantization_of, quantize
from llmc.load_test.machine import (
    describe_machine,
    measure_read_bandwidth,
    package_versions,
)
from llmc.load_test.report import context, write_json

SHAPES = "1024x6144,4096x4096"
COLD_BYTES = 300e6
EXPERTS, TOP_K, DEPTH, CHANNELS = 128, 8, 2048, 768


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    name: str
    weight_bytes: int  # that a call reads
    copies: int
    run: Callable[[Tensor, int], Tensor]  # with the i-th copy of the weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: str
    rows: int
    min_ms: float
    gb_per_s: float
    share_of_bandwidth: float


def linears(depth: int, channels: int) -> Iterator[Contestant]:
    weight = torch.randn(channels, depth) * depth**-0.5
    size = 2 * weight.numel()
    plain = [_in_huge_pages(weight.bfloat16()) for _ in range(_copies(size))]
    ops = torch.ops.llmc_cpu
    yield Contestant(
        name="bfloat16", weight_bytes=size, copies=len(plain),
        run=lambda x, i: ops.linear(x, plain[i], None),
    )  # fmt: skip
    for format in FORMATS:
        to = quantization_of(format, channels, depth)
        if to is None:
            raise SystemExit(f"error: {depth}x{channels} can't be held in {format}")
        low, scale = quantize(weight, to)
        size = low.numel() + scale.numel() * scale.element_size()
        held = [_in_huge_pages(low) for _ in range(_copies(size))]

        def run(x: Tensor, i: int, held: list[Tensor] = held, scale: Tensor = scale) -> Tensor:
            out: Tensor = ops.quantized_linear(x, held[i], scale, None, None)
            return out

        yield Contestant(name=format, weight_bytes=size, copies=len(held), run=run)


def experts(rows: int, *, transposed: bool) -> Contestant:
    shape = (EXPERTS, DEPTH, CHANNELS) if transposed else (EXPERTS, CHANNELS, DEPTH)
    weight = torch.randn(*shape, dtype=torch.bfloat16)  # 400 MB: itself more than the caches hold
    gen = torch.Generator().manual_seed(0)
    picks = [
        torch.stack([torch.randperm(EXPERTS, generator=gen)[:TOP_K] for _ in range(rows)]).flatten()
        for _ in range(16)
    ]
    read = sum(len(p.unique()) for p in picks) * CHANNELS * DEPTH * 2 // len(picks)
    return Contestant(
        name="experts, transposed" if transposed else "experts", weight_bytes=read, copies=16,
        run=lambda x, i: torch.ops.llmc_cpu.expert_linear(
            x.repeat_interleave(TOP_K, 0), weight, None, picks[i], transposed
        ),
    )  # fmt: skip


def _in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy that lies as loaded weights do."""
    return empty_in_huge_pages(tensor.shape, tensor.dtype).copy_(tensor)


def _copies(size: int) -> int:
    return max(2, int(COLD_BYTES / size))


def measure(
    contestants: list[Contestant], x: Tensor, label: str, seconds: float, bandwidth: float
) -> list[Result]:
    """Each in turn for a few calls, until the time is over."""
    best = [float("inf")] * len(contestants)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start, turn = time.perf_counter(), 0
    while turn < 3 or time.perf_counter() - start < seconds:
        for c, contestant in enumerate(contestants):
            for call in range(4):
                begin = clock()
                contestant.run(x, (turn * 4 + call) % contestant.copies)
                best[c] = min(best[c], clock() - begin)
        turn += 1
    results = []
    for contestant, took in zip(contestants, best, strict=True):
        rate = contestant.weight_bytes / took
        results.append(
            Result(
                case=f"{contestant.name} {label}",
                rows=len(x),
                min_ms=took * 1e3,
                gb_per_s=rate / 1e9,
                share_of_bandwidth=rate / bandwidth,
            )  # fmt: skip
        )
        print(
            f"{results[-1].case:32} {len(x):>5} {took * 1e3:9.3f} ms {rate / 1e9:7.1f} GB/s"
            f" {rate / bandwidth:6.0%}",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape and row count")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--shapes", default=SHAPES, help="KxN, comma-separated")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    if not load():
        raise SystemExit("error: the C++ ops can't be built here")
    torch.set_num_threads(args.threads)
    bandwidth = measure_read_bandwidth("cpu")
    print(f"{args.threads} threads, read bandwidth {bandwidth / 1e9:.1f} GB/s")
    results: list[Result] = []
    for shape in args.shapes.split(","):
        depth, channels = (int(n) for n in shape.split("x"))
        found = list(linears(depth, channels))
        for rows in (int(n) for n in args.rows.split(",")):
            x = torch.randn(rows, depth).bfloat16()
            results += measure(found, x, shape, args.seconds, bandwidth)
    for transposed in (False, True):
        x = torch.randn(1, DEPTH).bfloat16()
        routed = [experts(1, transposed=transposed)]
        results += measure(routed, x, f"{DEPTH}x{CHANNELS}", args.seconds, bandwidth)
    if args.output_json:
        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        fields = {"threads": args.threads, "read_bandwidth": bandwidth}
        write_json(args.output_json, {**facts, **fields, "results": [*map(asdict, results)]})


if __name__ == "__main__":
    main()
