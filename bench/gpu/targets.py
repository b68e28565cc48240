"""The project's targets on an H200, and where to find each figure in the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`path`: keys, starting with the part's name. `floor` is the minimum, `aim` the goal."""

    text: str
    path: tuple[str, ...]
    floor: float
    aim: float
    better: Literal["high", "low"]
    unit: str = "%"  # "%": a share; otherwise the value's own unit


TARGETS = (
    Target(
        text="batch-1 decode 8B bf16 at least 78 % of read bandwidth, aim 90",
        path=("8b", "decode", "1", "share_of_read"),
        floor=0.78, aim=0.90, better="high",
    ),
    Target(
        text="batch-1 decode 1B at least 56 % of read bandwidth, aim 80",
        path=("1b", "decode", "1", "share_of_read"),
        floor=0.56, aim=0.80, better="high",
    ),
    Target(
        text="0.6B step at most 1.3 ms, aim 0.7",
        path=("0.6b", "decode", "1", "step_ms"),
        floor=1.3, aim=0.7, better="low", unit="ms",
    ),
    Target(
        text="KV slope 80 % of read bandwidth, aim 95",
        path=("8b", "slope", "share_of_read"),
        floor=0.80, aim=0.95, better="high",
    ),
    Target(
        text="prefill 8B 60 % of cuBLAS at 512 tokens, aim 80",
        path=("8b", "prefill", "512", "mfu"),
        floor=0.60, aim=0.80, better="high",
    ),
    Target(
        text="prefill 8B 60 % of cuBLAS at 2K tokens, aim 80",
        path=("8b", "prefill", "2048", "mfu"),
        floor=0.60, aim=0.80, better="high",
    ),
    Target(
        text="prefill 8B 60 % of cuBLAS at 8K tokens, aim 80",
        path=("8b", "prefill", "8192", "mfu"),
        floor=0.60, aim=0.80, better="high",
    ),
    Target(
        text="at least 2.5 times generate_batch on 8B with 32 requests",
        path=("peer-8b", "batch", "ratio"),
        floor=2.5, aim=2.5, better="high", unit="x",
    ),
    Target(
        text="4 times generate_batch on 0.6B",
        path=("peer-0.6b", "batch", "ratio"),
        floor=4.0, aim=4.0, better="high", unit="x",
    ),
    Target(
        text="host at most 250 microseconds per step at 64 rows, aim 100",
        path=("8b", "decode", "64", "host_us"),
        floor=250, aim=100, better="low", unit="us",
    ),
    Target(
        text="host at 64 rows, on the smallest model",
        path=("0.6b", "decode", "64", "host_us"),
        floor=250, aim=100, better="low", unit="us",
    ),
    Target(
        text="GPU idle at most 5 %, aim 1 (8B, 64 rows)",
        path=("8b", "decode", "64", "idle_share"),
        floor=0.05, aim=0.01, better="low",
    ),
    Target(
        text="GPU idle at most 5 %, aim 1 (0.6B, 64 rows)",
        path=("0.6b", "decode", "64", "idle_share"),
        floor=0.05, aim=0.01, better="low",
    ),
    Target(
        text="bucket padding waste at most 10 %, aim 3 (8B)",
        path=("8b", "padding_waste"),
        floor=0.10, aim=0.03, better="low",
    ),
    Target(
        text="compilations that a step waited for: 0",
        path=("8b", "runtime_compiles"),
        floor=0, aim=0, better="low", unit="",
    ),
    Target(
        text="decode attention 75 % of read bandwidth uniform, aim 90",
        path=("kernels", "00", "0", "share_of_limit"),
        floor=0.75, aim=0.90, better="high",
    ),
    Target(
        text="1.5 times a static split on skewed batches, aim 3",
        path=("kernels", "static split", "speedup"),
        floor=1.5, aim=3.0, better="high", unit="x",
    ),
    Target(
        text="prefill attention at least 0.9 of the best torch back-end, aim 1.0 (2K)",
        path=("kernels", "02", "0", "torch_ratio"),
        floor=0.9, aim=1.0, better="high", unit="x",
    ),
    Target(
        text="prefill attention at least 0.9 of the best torch back-end, aim 1.0 (8K)",
        path=("kernels", "03", "0", "torch_ratio"),
        floor=0.9, aim=1.0, better="high", unit="x",
    ),
    Target(
        text="sampler, top-k + top-p, batch 128, vocabulary 151936: at most 0.35 ms, aim 0.15",
        path=("kernels", "04", "0", "ms"),
        floor=0.35, aim=0.15, better="low", unit="ms",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`value` is None if it was not measured, or its measurement failed."""

    target: Target
    value: float | None

    @property
    def word(self) -> str:
        if self.value is None:
            return "NOT MEASURED"
        if self._reaches(self.target.aim):
            return "aim reached"
        return "reached" if self._reaches(self.target.floor) else "SHORT"

    def _reaches(self, wanted: float) -> bool:
        assert self.value is not None
        return self.value >= wanted if self.target.better == "high" else self.value <= wanted


def judge(parts: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge all targets. `parts`: {name: {"data": {...}}} as in the result file."""
    for target in TARGETS:
        part, *keys = target.path
        yield Verdict(target=target, value=_find(parts.get(part, {}).get("data"), keys))


def _find(value: Any, keys: list[str]) -> float | None:
    for key in keys:
        if isinstance(value, list):
            value = value[int(key)] if int(key) < len(value) else None
        elif isinstance(value, Mapping):
            value = value.get(key)
        else:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
