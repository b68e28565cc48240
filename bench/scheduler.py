"""Measures the host time of a decode-only step: planning it and processing its result.

`python -m bench.scheduler [--rows N]` prints one line of JSON: microseconds per step (the median of
each round, and the minimum of these), with one and with two steps in flight. No model, no torch.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import deque

from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import StepPlan, StepResult
from llmc.engine.request import Request
from llmc.engine.scheduler import Scheduler
from llmc.sampling_params import SamplingParams

ROUNDS = 5
STEPS = 800


def filled(num_rows: int) -> Scheduler:
    """A scheduler with requests in all rows, with prompts of different lengths."""
    scheduler = Scheduler(
        EngineLimits(
            num_blocks=num_rows * 128,
            block_size=16,
            max_num_seqs=num_rows,
            max_num_batched_tokens=8192,
            max_model_len=4096,
            vocab_size=100,
        ),
        EngineFeatures(),
    )
    for index in range(num_rows):
        length = 32 + index % 16
        scheduler.add(
            Request(
                request_id=f"r{index}",
                token_ids=[index % 100 + 1] * length,
                num_prompt_tokens=length,
                sampling=SamplingParams(max_tokens=None),
                seed=1,
                max_total_tokens=1900 + index,
                stop_token_ids=frozenset({0}),
            )
        )
    return scheduler


def microseconds(num_rows: int, depth: int) -> float:
    """Median over STEPS steps, with `depth` of them in flight."""
    scheduler, result = filled(num_rows), StepResult(token_ids=[7] * num_rows)
    in_flight: deque[StepPlan] = deque()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None and len(plan.work) == num_rows
        in_flight.append(plan)
        if len(in_flight) == depth:
            scheduler.update(in_flight.popleft(), result)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    rows = parser.parse_args().rows
    figures = {
        f"us_per_step_{depth}_in_flight": round(
            min(microseconds(rows, depth) for _ in range(ROUNDS)), 1
        )
        for depth in (1, 2)
    }
    print(json.dumps({"rows": rows, "python": platform.python_version(), **figures}))


if __name__ == "__main__":
    main()
