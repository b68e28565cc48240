"""Decode figures of a running model: step times by batch, the host's share, the KV slope."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.gpu.direct import decode_seconds
from bench.gpu.shapes import cache_bytes_per_token, step_bytes
from bench.gpu.subject import Subject
from bench.gpu.timed_runner import TimedRunner
from llmc.engine.messages import AddRequest
from llmc.runner.buckets import default_buckets
from llmc.sampling_params import SamplingParams

_SKIP = 4  # steps at either end of a run, while requests start and finish


def steady_steps(subject: Subject, batch: int, *, async_scheduling: bool = True) -> dict[str, Any]:
    """Run `batch` requests through the whole engine: the time per step, and the host's share."""
    settings = subject.settings
    num_steps = settings.decode_steps
    runner = TimedRunner(subject.runner)
    core = subject.core(runner, async_scheduling)
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 4 * _SKIP, ignore_eos=True)
    for i, prompt in enumerate(subject.prompts(batch, settings.prompt_len)):
        core.add(AddRequest(request_id=str(i), prompt_token_ids=prompt, sampling=params))
    answered = 0
    while answered < _SKIP:  # prompts, then the first decodes
        answered += _all_gained_one(core.step(), batch)
    runner.times.reset()
    walls = []
    for _ in range(num_steps):
        start = time.perf_counter()
        updates = core.step()
        walls.append(time.perf_counter() - start)
        if not _all_gained_one(updates, batch):
            raise RuntimeError("a decode step did not include the whole batch")
    times, total = runner.times, sum(walls)
    host = total - times.wait_s
    while core.has_work:
        core.step()
    us = 1e6 / num_steps
    return {
        "step_ms": total / num_steps * 1e3,
        "median_ms": statistics.median(walls) * 1e3,
        "host_us": host * us,
        "launch_us": times.launch_s * us,
        "collect_us": times.collect_s * us,
        "schedule_us": (host - times.launch_s - times.collect_s) * us,
    }


def _all_gained_one(updates: Sequence[Any], batch: int) -> bool:
    for update in updates:
        if update.error is not None:
            raise RuntimeError(update.error)
    return len(updates) == batch and all(len(u.new_token_ids) == 1 for u in updates)


def by_batch(subject: Subject, read_bytes_per_s: float) -> dict[str, Any]:
    """Step time and share of the read bandwidth at every batch size."""
    settings, found = subject.settings, {}
    itemsize = 2 if settings.dtype == "bfloat16" else 4
    weights = step_bytes(subject.config, itemsize)
    per_token = cache_bytes_per_token(subject.config, itemsize)
    context = settings.prompt_len + settings.decode_steps // 2
    for batch in settings.batches:
        if batch > settings.max_rows:
            continue
        engine = steady_steps(subject, batch)
        device_s = decode_seconds(subject, batch, context, settings.decode_steps)
        floor_s = (weights + batch * context * per_token) / read_bytes_per_s
        found[str(batch)] = {
            **engine,
            "device_ms": device_s * 1e3,
            "share_of_read": floor_s / (engine["step_ms"] * 1e-3),
            "device_share_of_read": floor_s / device_s,
            "idle_share": max(0.0, 1 - device_s * 1e3 / engine["step_ms"]),
            "tokens_per_s": batch / (engine["step_ms"] * 1e-3),
        }
        print(
            f"  batch {batch}: {engine['step_ms']:.3f} ms, device {device_s * 1e3:.3f} ms, "
            f"host {engine['host_us']:.0f} us, {found[str(batch)]['share_of_read']:.0%} of read",
            flush=True,
        )
    return found


def kv_slope(subject: Subject, read_bytes_per_s: float) -> dict[str, Any]:
    """The cost of a token of context, from the two ends of a range of contexts."""
    settings = subject.settings
    rows, steps = settings.slope_rows, max(4, settings.decode_steps // 4)
    contexts = [c for c in settings.slope_contexts if c + 64 <= subject.info.max_model_len]
    times = {str(c): decode_seconds(subject, rows, c, steps) for c in contexts}
    first, last = contexts[0], contexts[-1]
    per_token = (times[str(last)] - times[str(first)]) / (last - first) / rows
    itemsize = 2 if settings.dtype == "bfloat16" else 4
    size = cache_bytes_per_token(subject.config, itemsize)
    return {
        "rows": rows,
        "device_ms_by_context": {c: s * 1e3 for c, s in times.items()},
        "ns_per_token": per_token * 1e9,
        "share_of_read": size / per_token / read_bytes_per_s if per_token > 0 else None,
    }


def padding_waste(by_batch_ms: dict[int, float], max_rows: int) -> float:
    """Extra step time of padding to the default sizes, for batches uniform over 1..max_rows.

    Times between the measured batches are interpolated.
    """
    sizes = default_buckets(max_rows)
    counts = range(1, max_rows + 1)
    real = sum(_interpolated(by_batch_ms, n) for n in counts)
    padded = sum(_interpolated(by_batch_ms, next(s for s in sizes if s >= n)) for n in counts)
    return padded / real - 1


def _interpolated(points: dict[int, float], n: int) -> float:
    known = sorted(points)
    below = max((k for k in known if k <= n), default=known[0])
    above = min((k for k in known if k >= n), default=known[-1])
    if below == above:
        return points[below]
    part = (n - below) / (above - below)
    return points[below] + part * (points[above] - points[below])
