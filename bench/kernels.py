"""Times every op at serving sizes: `python -m bench.kernels [--only NAME] [--device cuda]`.

Each row is compared with its physical limit, measured in the same run: the read bandwidth for ops
that stream memory, the best matrix product for prefill. The last column is torch's best time. Where
$LLMC_CPU_TARGET forces a level, torch has no more instructions either.
"""

from __future__ import annotations

import argparse
import importlib
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

import llmc.kernels.cpu  # noqa: F401
from bench.clock import time_call
from bench.kernel_work import (
    CPU,
    DTYPES,
    Maker,
    Work,
    decode_work,
    latent_work,
    made,
    prefill_work,
    prepare_work,
    process_work,
    row_work,
    sample_work,
)
from bench.linear_work import (
    embedding_work,
    expert_work,
    fused_work,
    low_bit_expert_work,
    low_bit_work,
    ways_work,
)
from bench.state_work import state_work
from bench.torch_level import limit_torch
from llmc.kernels.cpu.build import load
from llmc.kernels.quantized_linear import FORMATS
from llmc.load_test.machine import describe_machine, package_versions
from llmc.load_test.report import context, write_json

UNIFORM = [4096] * 64
SKEWED = [131072] + [4096] * 31
SKEWED_LABEL = "1 x 128K + 31 x 4K"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    op: str
    case: str
    ms: float
    rate: float
    unit: str
    share_of_limit: float
    torch_ms: float | None  # of torch's fastest alternative
    torch_way: str | None
    timed: str
    failed_peers: tuple[str, ...] = ()


def measure_limits(device: torch.device = CPU) -> dict[str, float]:
    """Bytes per second of a long read, and FLOP per second of a large product per dtype."""
    num, size = (2**28, 2048) if device.type == "cpu" else (2**30, 8192)
    big = torch.ones(num, device=device)  # 1 GiB or 4: no cache holds it
    limits = {"read": big.nbytes / time_call(big.sum, device).seconds}
    for name, dtype in DTYPES.items():
        square = torch.randn(size, size, dtype=dtype, device=device)
        product = time_call(partial(torch.mm, square, square), device)
        limits[name] = 2 * size**3 / product.seconds
    return limits


def cpu_work() -> Iterator[Maker]:
    for name in DTYPES:
        yield partial(decode_work, name, [4096], 16, 8, 128)
        yield partial(decode_work, name, [4096] * 8, 16, 8, 128)
        yield partial(decode_work, name, [4096] * 8, 14, 2, 64)
        yield partial(decode_work, name, [32768], 32, 8, 128)
        for lengths in ((1, 512), (1, 4096), (128, 128), (512, 512), (2048, 2048), (512, 4096)):
            yield partial(latent_work, name, *lengths)
        for tokens in (1024, 4096):
            for dim in (64, 128):
                yield partial(prefill_work, name, tokens, 16, 8, dim)
        for rows in (1, 512):
            yield partial(row_work, name, rows, 1024)
    for cache in (torch.float8_e4m3fn, torch.int8):
        yield partial(decode_work, "bf16", [4096] * 8, 16, 8, 128, cache=cache)
    for cache in (None, torch.float16, torch.int8):
        yield partial(decode_work, "fp32", [4096] * 8, 9, 3, 64, cache=cache)
        yield partial(decode_work, "fp32", [4096] * 8, 32, 8, 128, cache=cache)
    for rows in (1, 8):
        for format in FORMATS:
            yield partial(low_bit_work, format, rows, 4096, 4096)
    for tokens in (1, 512):
        for format in FORMATS:
            yield partial(embedding_work, format, tokens, 2048, 65536)
    yield partial(expert_work, 1, 128, 8, 2048, 768)
    for kind in ("greedy", "plain", "top_k", "top_p", "top_k+top_p"):
        yield partial(sample_work, 8, 151_936, kind)
    yield partial(process_work, 8, 151_936)
    yield partial(prepare_work, 64, 4096, CPU)
    for rows, tokens in ((1, 1), (32, 1), (1, 512)):
        yield partial(state_work, "bf16", rows, tokens)


def gpu_work(device: torch.device, *, flex: bool = False) -> Iterator[Maker]:
    """The work on a GPU; ops with a target come first. `flex`: as in `prefill_work`."""
    yield partial(decode_work, "bf16", UNIFORM, 32, 8, 128, device)
    yield partial(decode_work, "bf16", SKEWED, 32, 8, 128, device, SKEWED_LABEL)
    for cache in (torch.float8_e4m3fn, torch.int8):
        yield partial(decode_work, "bf16", UNIFORM, 32, 8, 128, device, cache=cache)
    for tokens in (2048, 8192):
        yield partial(prefill_work, "bf16", tokens, 32, 8, 128, device, flex=flex)
    for kind in ("top_k+top_p", "greedy", "plain", "top_k", "top_p"):
        yield partial(sample_work, 128, 151_936, kind, device)
    yield partial(process_work, 128, 151_936, device)
    for rows in (64, 256):
        yield partial(prepare_work, rows, 4096, device)
    yield partial(decode_work, "bf16", [1024], 32, 8, 128, device)
    yield partial(decode_work, "bf16", [32768], 32, 8, 128, device)
    yield partial(decode_work, "bf16", [512] * 256, 16, 8, 128, device)
    yield partial(prefill_work, "bf16", 4096, 32, 8, 64, device)
    for rows in (1, 8):
        yield partial(fused_work, rows, 4096, 14336, device)
    for rows in (1, 8, 2048):
        for format in FORMATS:
            yield partial(low_bit_work, format, rows, 4096, 14336, device)
    for format in ("int4", "fp8"):
        for rows in (64, 128, 256, 512):
            yield partial(ways_work, format, rows, 4096, 14336, device)
    for tokens in (64, 4096):
        for format in FORMATS:
            yield partial(embedding_work, format, tokens, 4096, 65536, device)
    for rows in (8, 4096):
        yield partial(expert_work, rows, 128, 8, 2048, 768, device)
        for format in ("int4", "fp8"):
            yield partial(low_bit_expert_work, format, rows, 128, 8, 2048, 768, device)
    for rows in (1, 64, 2048):
        yield partial(row_work, "bf16", rows, 4096, device)
    for rows, tokens in ((1, 1), (64, 1), (1, 4096)):
        yield partial(state_work, "bf16", rows, tokens, device)


def measure(work: Work, limits: dict[str, float]) -> Result:
    took = time_call(work.run, work.device)
    rate = (work.num_flops or work.num_bytes) / took.seconds
    peers: dict[str, float] = {}
    failed = []
    for name, call in work.peers.items():
        try:
            peers[name] = time_call(call, work.device).seconds
        except RuntimeError as error:  # raised by a backend that does not support these shapes
            failed.append(f"{name}: {str(error).splitlines()[0][:200]}")
    best = min(peers, key=lambda n: peers[n], default=None)
    return Result(
        op=work.op,
        case=work.case,
        ms=took.seconds * 1e3,
        rate=rate / 1e9,
        unit="GFLOP/s" if work.num_flops else "GB/s",
        share_of_limit=rate / limits[work.limit],
        torch_ms=None if best is None else peers[best] * 1e3,
        torch_way=best,
        timed=took.how,
        failed_peers=tuple(failed),
    )


def format_row(result: Result) -> str:
    against = "-"
    if result.torch_ms is not None:
        times = result.torch_ms / result.ms
        against = f"{result.torch_ms:9.4f} ({result.torch_way}, {times:.2f}x)"
    return (
        f"{result.op:16} {result.case:44} {result.ms:9.4f} {result.rate:9.1f} {result.unit:8}"
        f"{result.share_of_limit:6.0%}   {against}"
    )


HEAD = f"{'op':16} {'case':44} {'ms':>9} {'rate':>9} {'unit':8}{'limit':>6}   torch ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only ops or cases that contain this")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        importlib.import_module("llmc.kernels.triton")
    elif not load():
        raise SystemExit("the C++ ops could not be built; see the warning above")
    limit_torch()
    limits = measure_limits(device)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}")
    print(", ".join(f"{name}: {value / 1e9:.1f} G/s" for name, value in limits.items()))
    print(HEAD)
    results = []
    for maker in cpu_work() if device.type == "cpu" else gpu_work(device, flex=True):
        for work in made(maker):
            if args.only in work.op or args.only in work.case:
                result = measure(work, limits)
                print(format_row(result), flush=True)
                results.append(asdict(result))
    if args.output_json:
        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        write_json(args.output_json, {**facts, "limits": limits, "results": results})


if __name__ == "__main__":
    main()
