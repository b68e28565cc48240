"""Logs a line about throughput every ten seconds while requests are being served."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from llmc.engine.messages import EngineStats

log = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def log_throughput(read: Callable[[], EngineStats], interval_s: float = INTERVAL_S) -> None:
    """Log the throughput since the last line; nothing while idle. Runs until cancelled."""
    before, then = read(), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now, after = time.monotonic(), read()
        line = throughput_line(before, after, now - then)
        if line is not None:
            log.info(line)
        before, then = after, now


def throughput_line(before: EngineStats, after: EngineStats, seconds: float) -> str | None:
    """The log line, or None if nothing ran in between and nothing is running or waiting now."""
    # A restarted engine counts from 0.
    prompt = max(0, after.num_prompt_tokens - before.num_prompt_tokens)
    generated = max(0, after.num_generated_tokens - before.num_generated_tokens)
    if not (prompt or generated or after.num_running or after.num_waiting):
        return None
    used = 1 - after.num_free_blocks / max(1, after.num_blocks)
    hits = after.prefix_cache_hits / max(1, after.prefix_cache_queries)
    return (
        f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
        f"Running: {after.num_running} reqs, Waiting: {after.num_waiting} reqs, "
        f"KV cache usage: {used:.1%}, Prefix cache hit rate: {hits:.1%}{_eager(before, after)}"
    )


def _eager(before: EngineStats, after: EngineStats) -> str:
    """What to add if steps ran without a CUDA graph."""
    was = before.eager_steps
    counts = {why: max(0, count - was[why]) for why, count in after.eager_steps.items()}
    reasons = ", ".join(f"{why.replace('_', ' ')}: {n}" for why, n in counts.items() if n)
    steps = max(0, after.num_steps - before.num_steps)
    total = sum(counts.values())
    return f", Steps without CUDA graph: {total} of {steps} ({reasons})" if total else ""
