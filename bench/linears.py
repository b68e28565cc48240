"""Compares linears of every weight format and row count with torch and the machine's limits.

    python -m bench.linears [--threads 2] [--seconds 1.0] [--rows 1,2,...] [--shapes KxN,...]
                            [--formats float32,...] [--output-json FILE]

The limit of a call is the time to read its weight at the read bandwidth, or the time of its
operations at the rate of the library's largest product in the same dtype (in float32, if the CPU
has no instructions for the dtype and that is slower); both are measured in the same run. Weights of
one shape rotate through more memory than the caches can hold, and the contestants alternate; the
minimum time of a call counts. `--threads 1` counts the thread's own CPU time, which other processes
disturb less. Where $LLMC_CPU_TARGET forces a level, torch has no more instructions either. x is
bfloat16 for the low-bit formats. For `int4/8` it is rounded to 8 bits, so it can exceed the limit,
which is that of floats. Experts: 8 of 128 chosen per row, as in a routed layer with 2048 inputs and
768 channels; only the chosen ones are read and counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

import llmc.kernels.cpu  # noqa: F401
from bench.torch_level import limit_torch
from llmc.kernels.cpu.build import load
from llmc.kernels.cpu.levels import multiplies_integers
from llmc.kernels.cpu.pages import HugePages
from llmc.kernels.quantized_linear import (
    EXACT_BITS,
    FORMATS,
    Format,
    mxfp4_draw,
    packed_draw,
    quantization_of,
    quantize,
    superblock_draw,
)
from llmc.load_test.machine import (
    describe_machine,
    measure_read_bandwidth,
    package_versions,
)
from llmc.load_test.report import context, write_json
from llmc.weights.gguf.blocks import KEPT, kept_as

SHAPES = "1024x6144,4096x4096"
ROWS = "1,2,4,8,16,32,64,256,1024"
# of GGUF files
TYPES = {kind.name.lower(): kind for kind in KEPT}
# weight and bits of x, if the CPU multiplies integers
INTEGERS = (
    *("int8/16", "int4/16", "int4/8", *(f"{name}/16" for name in TYPES)),
    *("q4_k/8", "q5_k/8", "q6_k/8"),
)
ROUNDED = (*INTEGERS, "fp8/8")
STORED = (*FORMATS, *TYPES)
PLAIN = ("float32", "bfloat16", "float16")
LIMIT_SIZE = 2048  # of the square product that determines the rate of operations
COLD_BYTES = 300e6
PAUSE_S = 0.003  # OpenMP's threads spin for about one after torch's products
EXPERTS, TOP_K, DEPTH, CHANNELS = 128, 8, 2048, 768
MEMORY = HugePages(torch.device("cpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    name: str
    weight_bytes: int  # read by a call
    row_operations: int  # per row
    dtype: torch.dtype  # of x
    copies: int
    run: Callable[[Tensor, int], Tensor]  # with the i-th copy of the weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: str
    rows: int
    min_ms: float
    gb_per_s: float
    gflop_per_s: float
    share_of_limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes per second, and operations per second by dtype."""

    read: float
    products: dict[torch.dtype, float]

    def seconds(self, contestant: Contestant, rows: int) -> float:
        """The minimum time of a call."""
        operations = contestant.row_operations * rows
        return max(
            contestant.weight_bytes / self.read, operations / self.products[contestant.dtype]
        )


def measure_limits() -> Limits:
    rates: dict[torch.dtype, float] = {}
    for dtype in (getattr(torch, name) for name in PLAIN):
        least = rates.get(torch.float32, 0.0)
        # a product without CPU instructions may take minutes; a small one detects that
        is_slow = _rate(dtype, LIMIT_SIZE // 8) < least / 4
        rates[dtype] = least if is_slow else max(least, _rate(dtype, LIMIT_SIZE))
    return Limits(read=measure_read_bandwidth("cpu"), products=rates)


def _rate(dtype: torch.dtype, size: int) -> float:
    """Operations per second of a square product."""
    a, clock = torch.randn(size, size).to(dtype), _clock()
    return 2 * size**3 / min(_took(lambda: a @ a, clock) for _ in range(3))


def _clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _took(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def linears(depth: int, channels: int, formats: Iterable[str]) -> Iterator[Contestant]:
    weight = torch.randn(channels, depth) * depth**-0.5
    for name in formats:
        if name in PLAIN:
            yield from _plain(weight, getattr(torch, name))
        else:
            format, _, bits = name.partition("/")
            if format not in STORED or (bits and name not in ROUNDED):
                known = ", ".join((*PLAIN, *STORED, *ROUNDED))
                raise SystemExit(f"error: --formats has {name!r}; known are {known}")
            yield _low_bit(weight, format, int(bits or EXACT_BITS), name)


def _plain(weight: Tensor, dtype: torch.dtype) -> Iterator[Contestant]:
    """Our linear and torch's, over the same weights."""
    size, name = weight.numel() * dtype.itemsize, str(dtype).removeprefix("torch.")
    copies = [_in_huge_pages(weight.to(dtype)) for _ in range(_copies(size))]
    ops = {name: torch.ops.llmc_cpu.linear, f"{name}, torch": torch.nn.functional.linear}
    for name, op in ops.items():
        yield Contestant(
            name=name, weight_bytes=size, copies=len(copies), dtype=dtype,
            row_operations=2 * weight.numel(),
            run=lambda x, i, op=op: op(x, copies[i], None),  # type: ignore[misc]
        )  # fmt: skip


def _low_bit(weight: Tensor, format: str, bits: int, name: str) -> Contestant:
    gen = torch.Generator().manual_seed(0)
    minimum: Tensor | None = None
    if format in TYPES:  # no model is quantized to these here
        low, scale, minimum = _drawn(gen, TYPES[format], *weight.shape)
    else:
        to = quantization_of(cast(Format, format), *weight.shape)
        if to is None:
            raise SystemExit(f"error: {tuple(weight.shape)} can't be stored in {format}")
        low, scale = quantize(weight, to)
    size = sum(part.nbytes for part in (low, scale, minimum) if part is not None)
    copies = [_in_huge_pages(low) for _ in range(_copies(size))]
    return Contestant(
        name=name, weight_bytes=size, copies=len(copies), dtype=torch.bfloat16,
        row_operations=2 * weight.numel(),
        run=lambda x, i: torch.ops.llmc_cpu.quantized_linear(
            x, copies[i], scale, None, None, minimum, bits
        ),
    )  # fmt: skip


def _drawn(
    gen: torch.Generator, kind: GGMLQuantizationType, channels: int, depth: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A random (weight, scale, minimum) [channels, depth], as that of a GGUF file is kept."""
    to = kept_as(kind, depth)
    if to is None:
        raise SystemExit(f"error: {(channels, depth)} can't be kept as in {kind.name}")
    if to.scale == "exponent":
        return *mxfp4_draw(gen, channels, depth), None
    if to.scale == "superblock":
        return *superblock_draw(gen, to.format, to.group, to.minimum, channels, depth), None
    scale = 0.5 + torch.rand(to.shape("scale", channels, depth), generator=gen)
    scale = (scale / 256).to(to.scale_dtype)
    minimum = (-8 * scale).to(to.dtypes["minimum"]) if to.minimum else None
    return packed_draw(gen, to, channels, depth).view(to.dtype), scale, minimum


def experts(rows: int, *, transposed: bool) -> Contestant:
    shape = (EXPERTS, DEPTH, CHANNELS) if transposed else (EXPERTS, CHANNELS, DEPTH)
    # 400 MB: itself more than the caches hold
    weight = _in_huge_pages(torch.randn(*shape, dtype=torch.bfloat16))
    gen = torch.Generator().manual_seed(0)
    picks = [
        torch.stack([torch.randperm(EXPERTS, generator=gen)[:TOP_K] for _ in range(rows)]).flatten()
        for _ in range(16)
    ]
    read = sum(len(p.unique()) for p in picks) * CHANNELS * DEPTH * 2 // len(picks)
    return Contestant(
        name="experts, transposed" if transposed else "experts", weight_bytes=read, copies=16,
        row_operations=2 * TOP_K * DEPTH * CHANNELS, dtype=torch.bfloat16,
        run=lambda x, i: torch.ops.llmc_cpu.expert_linear(
            x.repeat_interleave(TOP_K, 0), weight, None, picks[i], transposed
        ),
    )  # fmt: skip


def _in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy in huge pages, like loaded weights."""
    return MEMORY.empty(tensor.shape, tensor.dtype).copy_(tensor)


def _copies(size: int) -> int:
    return max(2, int(COLD_BYTES / size))


def _let_others_sleep() -> None:
    """Wait until no thread spins on a core that the next product needs, without sleeping: a
    virtual machine takes half a millisecond to give idle cores back."""
    end = time.perf_counter() + PAUSE_S
    while time.perf_counter() < end:
        pass


def measure(
    contestants: list[Contestant], rows: int, depth: int, label: str, seconds: float, limits: Limits
) -> list[Result]:
    """Run the contestants alternately, a few calls each, until the time is up."""
    best = [float("inf")] * len(contestants)
    inputs = {c.dtype: torch.randn(rows, depth).to(c.dtype) for c in contestants}
    start, turn, clock = time.perf_counter(), 0, _clock()
    while turn < 3 or time.perf_counter() - start < seconds:
        for c, contestant in enumerate(contestants):
            _let_others_sleep()
            for call in range(4):
                i = (turn * 4 + call) % contestant.copies
                run = partial(contestant.run, inputs[contestant.dtype], i)
                best[c] = min(best[c], _took(run, clock))
        turn += 1
    results = []
    for contestant, took in zip(contestants, best, strict=True):
        results.append(
            Result(
                case=f"{contestant.name} {label}",
                rows=rows,
                min_ms=took * 1e3,
                gb_per_s=contestant.weight_bytes / took / 1e9,
                gflop_per_s=contestant.row_operations * rows / took / 1e9,
                share_of_limit=limits.seconds(contestant, rows) / took,
            )  # fmt: skip
        )
        print(
            "{case:32} {rows:>5} {min_ms:9.3f} ms {gb_per_s:7.1f} GB/s {gflop_per_s:7.1f} GFLOP/s"
            " {share_of_limit:6.0%}".format(**asdict(results[-1])),
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape and row count")
    parser.add_argument("--rows", default=ROWS)
    rounded = [name for name in ROUNDED if name not in INTEGERS or multiplies_integers()]
    parser.add_argument("--formats", default=",".join((*PLAIN, *STORED, *rounded)))
    parser.add_argument("--shapes", default=SHAPES, help="KxN, comma-separated")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    if not load():
        raise SystemExit("error: the C++ ops can't be built here")
    limit_torch()
    torch.set_num_threads(args.threads)
    limits = measure_limits()
    rates = {str(d).removeprefix("torch."): rate for d, rate in limits.products.items()}
    print(
        f"{args.threads} threads, read bandwidth {limits.read / 1e9:.1f} GB/s; products, GFLOP/s:"
    )
    print(", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items()))
    results: list[Result] = []
    for shape in args.shapes.split(","):
        depth, channels = (int(n) for n in shape.split("x"))
        found = list(linears(depth, channels, args.formats.split(",")))
        for rows in (int(n) for n in args.rows.split(",")):
            results += measure(found, rows, depth, shape, args.seconds, limits)
    for transposed in (False, True):
        routed = [experts(1, transposed=transposed)]
        results += measure(routed, 1, DEPTH, f"{DEPTH}x{CHANNELS}", args.seconds, limits)
    if args.output_json:
        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        fields = {"threads": args.threads, "read_bandwidth": limits.read, "products": rates}
        write_json(args.output_json, {**facts, **fields, "results": [*map(asdict, results)]})


if __name__ == "__main__":
    main()
