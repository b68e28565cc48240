"""Times every CPU op at serving sizes: `python -m bench.kernels [--only NAME]`.

Each row names its physical limit, measured in the same run: the read bandwidth for ops that stream
memory, the best matrix product for prefill. Beside it stands the best that torch itself offers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import llmc.kernels.cpu  # noqa: F401
from llmc.kernels.cpu.build import load
from llmc.kernels.paged_attention import make_case

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One op at one size, and the same result by torch alone (None: torch has no such op)."""

    op: str
    case: str
    run: Callable[[], Any]
    peer: Callable[[], Any] | None
    num_bytes: float = 0.0  # that must be read or written
    num_flops: float = 0.0
    limit: str = "read"  # "read", or the dtype of the matrix product


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    op: str
    case: str
    ms: float
    rate: float
    unit: str
    share_of_limit: float
    torch_ms: float | None


def seconds(run: Callable[[], Any], budget_s: float = 0.4) -> float:
    """Median time of one call, over as many as fit in the budget (3 to 200)."""
    run()
    start = time.perf_counter()
    run()
    once = max(time.perf_counter() - start, 1e-6)
    times = []
    for _ in range(max(3, min(200, int(budget_s / once)))):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_limits() -> dict[str, float]:
    """Bytes per second of a long read, and FLOP per second of a large product of each dtype."""
    big = torch.ones(2**28)  # 1 GiB: no cache holds it
    limits = {"read": big.nbytes / seconds(big.sum)}
    for name, dtype in DTYPES.items():
        square = torch.randn(2048, 2048, dtype=dtype)
        limits[name] = 2 * 2048**3 / seconds(partial(torch.mm, square, square))
    return limits


def decode_work(name: str, requests: int, context: int, heads: int, kv: int, dim: int) -> Work:
    case = make_case([(1, context)] * requests, heads, kv, dim, dim, 32, CPU, DTYPES[name])
    query = case[0][:, :, None]
    key = torch.randn(requests, kv, context, dim, dtype=DTYPES[name])
    return Work(
        op="paged_attention",
        case=f"decode {requests} x {context}, {heads}/{kv} x {dim}, {name}",
        run=lambda: torch.ops.llmc_cpu.paged_attention(*case),
        peer=lambda: F.scaled_dot_product_attention(query, key, key, enable_gqa=True),
        num_bytes=2.0 * key.nbytes,
    )


def prefill_work(name: str, tokens: int, heads: int, kv: int, dim: int) -> Work:
    case = make_case([(tokens, tokens)], heads, kv, dim, dim, 32, CPU, DTYPES[name])
    query = torch.randn(1, heads, tokens, dim, dtype=DTYPES[name])
    key = torch.randn(1, kv, tokens, dim, dtype=DTYPES[name])
    return Work(
        op="paged_attention",
        case=f"prefill {tokens}, {heads}/{kv} x {dim}, {name}",
        run=lambda: torch.ops.llmc_cpu.paged_attention(*case),
        peer=lambda: F.scaled_dot_product_attention(
            query, key, key, is_causal=True, enable_gqa=True
        ),
        num_flops=2.0 * heads * dim * tokens * (tokens + 1),
        limit=name,
    )


def row_work(name: str, rows: int, width: int) -> Iterator[Work]:
    """Norms, activation and cache writes of a step of `rows` tokens."""
    ops, dtype, size = torch.ops.llmc_cpu, DTYPES[name], DTYPES[name].itemsize
    x, residual = torch.randn(rows, width, dtype=dtype), torch.randn(rows, width, dtype=dtype)
    weight, gate_up = torch.randn(width, dtype=dtype), torch.randn(rows, 6 * width, dtype=dtype)
    label = f"{rows} x {width}, {name}"
    yield Work(
        op="rms_norm", case=label, num_bytes=2.0 * rows * width * size,
        run=lambda: ops.rms_norm(x, weight, 1e-6, 0.0),
        peer=lambda: F.rms_norm(x, (width,), weight, 1e-6),
    )  # fmt: skip
    yield Work(
        op="add_rms_norm", case=label, num_bytes=4.0 * rows * width * size,
        run=lambda: ops.add_rms_norm(x, residual, weight, 1e-6, 0.0),
        peer=lambda: F.rms_norm(x + residual, (width,), weight, 1e-6),
    )  # fmt: skip
    yield Work(
        op="act_mul", case=label, num_bytes=9.0 * rows * width * size,
        run=lambda: ops.act_mul(gate_up, "silu"),
        peer=lambda: F.silu(gate_up[:, : 3 * width]) * gate_up[:, 3 * width :],
    )  # fmt: skip
    key = torch.randn(rows, 8, 128, dtype=dtype)
    query = torch.randn(rows, 16, 128, dtype=dtype)
    caches = torch.zeros(2, rows // 32 + 1, 8, 32, 128, dtype=dtype)
    slots, norm = torch.arange(rows), torch.randn(128, dtype=dtype)
    cos, sin = torch.rand(4096, 128), torch.rand(4096, 128)

    def peer_write() -> None:
        caches[0][slots // 32, :, slots % 32] = key
        caches[1][slots // 32, :, slots % 32] = key

    yield Work(
        op="write_kv", case=label, num_bytes=4.0 * key.nbytes, peer=peer_write,
        run=lambda: ops.write_kv(key, key, caches[0], caches[1], slots),
    )  # fmt: skip
    yield Work(
        op="rope_write", case=label, num_bytes=2.0 * (query.nbytes + 2 * key.nbytes), peer=None,
        run=lambda: ops.rope_write(query, key, key, norm, norm, 1e-6, 0.0, cos, sin, slots % 4096,
                                   False, caches[0], caches[1], slots),
    )  # fmt: skip


def sample_work(rows: int, vocab: int, kind: str) -> Work:
    logits = torch.randn(rows, vocab) * 3
    temperature, top_k, top_p = {
        "greedy": (0.0, 0, 1.0), "plain": (1.0, 0, 1.0), "top_k": (1.0, 50, 1.0),
        "top_p": (1.0, 0, 0.9), "top_k+top_p": (0.8, 50, 0.9),
    }[kind]  # fmt: skip
    ones, ids = torch.ones(rows), torch.arange(rows)
    case = (logits, ones * temperature, ones.int() * top_k, ones * top_p, ones * 0, ids, ids)

    def peer() -> Tensor:
        if kind == "greedy":
            return logits.argmax(-1)
        if kind == "top_p":
            probs, order = logits.softmax(-1).sort(-1, descending=True)
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0)
            return order.gather(-1, torch.multinomial(probs, 1))
        if top_k:
            values, order = logits.topk(top_k)
            return order.gather(-1, torch.multinomial(values.softmax(-1), 1))
        return torch.multinomial(logits.softmax(-1), 1)

    return Work(
        op="sample", case=f"{rows} x {vocab}, {kind}", num_bytes=logits.nbytes, peer=peer,
        run=lambda: torch.ops.llmc_cpu.sample(*case),
    )  # fmt: skip


def process_work(rows: int, vocab: int) -> Work:
    logits, ids = torch.randn(rows, vocab, dtype=torch.bfloat16), torch.arange(rows)
    zero, one = torch.zeros(rows), torch.ones(rows)
    case = (
        logits, ids, ids.int() + 100, torch.zeros(rows, 256).int(), ids.int(), one, zero, zero,
        torch.full((rows, 4), -1).int(), torch.zeros(rows, 4), torch.zeros(rows, 4).int(),
        torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, (vocab + 31) // 32).int(),
    )  # fmt: skip
    return Work(
        op="process_logits", case=f"{rows} x {vocab}, neutral", num_bytes=3.0 * logits.nbytes,
        run=lambda: torch.ops.llmc_cpu.process_logits(*case), peer=logits.float,
    )  # fmt: skip


def all_work() -> Iterator[Work]:
    for name in DTYPES:
        yield decode_work(name, 1, 4096, 16, 8, 128)
        yield decode_work(name, 8, 4096, 16, 8, 128)
        yield decode_work(name, 8, 4096, 14, 2, 64)
        yield decode_work(name, 1, 32768, 32, 8, 128)
        for tokens in (1024, 4096):
            for dim in (64, 128):
                yield prefill_work(name, tokens, 16, 8, dim)
        for rows in (1, 512):
            yield from row_work(name, rows, 1024)
    for kind in ("greedy", "plain", "top_k", "top_p", "top_k+top_p"):
        yield sample_work(8, 151_936, kind)
    yield process_work(8, 151_936)


def measure(work: Work, limits: dict[str, float]) -> Result:
    took = seconds(work.run)
    rate = (work.num_flops or work.num_bytes) / took
    return Result(
        op=work.op,
        case=work.case,
        ms=took * 1e3,
        rate=rate / 1e9,
        unit="GFLOP/s" if work.num_flops else "GB/s",
        share_of_limit=rate / limits[work.limit],
        torch_ms=None if work.peer is None else seconds(work.peer) * 1e3,
    )


def format_row(result: Result) -> str:
    against = "-"
    if result.torch_ms is not None:
        against = f"{result.torch_ms:9.4f} ({result.torch_ms / result.ms:.2f}x)"
    return (
        f"{result.op:16} {result.case:38} {result.ms:9.4f} {result.rate:9.1f} {result.unit:8}"
        f"{result.share_of_limit:6.0%}   {against}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only ops or cases that contain this")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    if not load():
        raise SystemExit("the C++ ops could not be built; see the warning above")
    limits = measure_limits()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}")
    print(", ".join(f"{name}: {value / 1e9:.1f} G/s" for name, value in limits.items()))
    print(
        f"{'op':16} {'case':38} {'ms':>9} {'rate':>9} {'unit':8}{'limit':>6}   torch ms (speedup)"
    )
    results = []
    for work in all_work():
        if args.only in work.op or args.only in work.case:
            results.append(measure(work, limits))
            print(format_row(results[-1]), flush=True)
    if args.output_json:
        report = {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "limits": limits,
            "results": [asdict(result) for result in results],
        }
        args.output_json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
