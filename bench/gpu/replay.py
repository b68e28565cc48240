"""Profiles one decode step: its kernels, how many per layer, and the gaps between them."""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.direct import DirectBatch
from bench.gpu.subject import Subject

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_STEPS = 3  # profiled; the last one counts, when the profiler is warm
_TOP = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One kernel or copy; microseconds."""

    name: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


def profile_replay(subject: Subject, rows: int, trace: Path | None = None) -> dict[str, Any]:
    """Profile `rows` requests with short contexts, and keep the trace of the last step, for
    chrome://tracing or Perfetto. On a CPU, ops are counted instead of kernels."""
    runner = subject.runner
    is_gpu = runner.rows.device.type == "cuda"
    batch = DirectBatch(subject, rows, subject.settings.prompt_len, 8 + _STEPS)
    for _ in range(4):
        runner.execute(batch.next())
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    spans: list[Span] = []
    for _ in range(_STEPS):
        plan = batch.next()
        with profile(activities=[activity]) as profiler:
            runner.execute(plan)
            if is_gpu:
                torch.cuda.synchronize()
        spans = read_spans(profiler, _ON_GPU if is_gpu else ("cpu_op",), trace)
    runner.launch(batch.leave())
    return summary(spans, subject.config["num_hidden_layers"])


def read_spans(profiler: Any, kinds: Sequence[str], trace: Path | None) -> list[Span]:
    """Spans by start time, from the trace file, whose format is the same in all torch versions."""
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    spans = [
        Span(name=str(e["name"]), start=float(e["ts"]), length=float(e["dur"]))
        for e in events
        if e.get("ph") == "X" and str(e.get("cat", "")).lower() in kinds
    ]
    return sorted(spans, key=lambda s: s.start)


def summary(spans: Sequence[Span], num_layers: int) -> dict[str, Any]:
    """Counts and microseconds. A gap is time in which nothing runs; overlaps count once."""
    if not spans:
        raise RuntimeError("the profiler recorded no kernels")
    gaps = []
    busy, end = 0.0, spans[0].start
    for span in spans:
        if span.start > end:
            gaps.append(span.start - end)
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    total = end - spans[0].start
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span.length)
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_TOP]
    return {
        "kernels": len(spans),
        "kernels_per_layer": len(spans) / num_layers,
        "total_us": total,
        "busy_us": busy,
        "gap_us": total - busy,
        "gap_share": (total - busy) / total if total else 0.0,
        "num_gaps": len(gaps),
        "median_gap_us": statistics.median(gaps) if gaps else 0.0,
        "largest_gaps_us": sorted(gaps, reverse=True)[:5],
        "top": [
            {"name": name[:160], "count": len(times), "total_us": sum(times)} for name, times in top
        ],
    }
