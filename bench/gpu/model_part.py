"""`8b`, `0.6b`, `1b`: all measurements of one model, in one process. `8b-tuned`, `0.6b-tuned`: with
measured launch options, those that depend on them.
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu import limits
from bench.gpu.decode import by_batch, kv_slope, padding_waste
from bench.gpu.direct import prefill_plan
from bench.gpu.record import Record
from bench.gpu.replay import profile_replay
from bench.gpu.settings import Settings
from bench.gpu.shapes import prefill_flops
from bench.gpu.subject import Subject, release, running, serve
from bench.gpu.tune_part import using_table
from llmc.engine.messages import AddRequest
from llmc.engine.plan import StepPlan
from llmc.kernels.tuned import load_table
from llmc.runner.model_runner import ModelRunner
from llmc.sampling_params import SamplingParams


def run(name: str, settings: Settings, record: Record) -> None:
    read, flops = _limits(settings, record)

    def trace(rows: str) -> Path | None:
        return record.beside(f"{name}-replay-{rows}.json.gz")

    with running(settings, settings.model(name)) as subject:
        record.measure("start", lambda: subject.startup)
        decode = record.measure("decode", partial(by_batch, subject, read))
        if decode:
            points = {int(b): row["device_ms"] for b, row in decode.items()}
            record.measure("padding_waste", partial(padding_waste, points, max(points)))
        record.measure("replay", partial(profile_replay, subject, 1, trace("1")))
        record.measure("slope", partial(kv_slope, subject, read))
        record.measure("prefill", partial(prefill, subject, flops))
        record.measure("mixed", partial(mixed, subject))
        many = min(64, settings.max_rows)
        record.measure("replay_64", partial(profile_replay, subject, many, trace("64")))
        record.measure("runtime_compiles", lambda: subject.runner.num_runtime_compiles)


def run_tuned(name: str, settings: Settings, record: Record) -> None:
    """With the table that `tune` and `prompts` have written, unless it has no lines."""
    with using_table(record):
        if not load_table():
            record.data["unchanged"] = "no options are faster than those that the code chooses"
            return
        read, flops = _limits(settings, record)
        with running(settings, settings.model(name)) as subject:
            record.measure("start", lambda: subject.startup)
            record.measure("decode", partial(by_batch, subject, read))
            record.measure("slope", partial(kv_slope, subject, read))
            record.measure("prefill", partial(prefill, subject, flops))
            record.measure("mixed", partial(mixed, subject))


def _limits(settings: Settings, record: Record) -> tuple[float, float]:
    """Bytes and FLOP per second."""
    read = record.measure("bandwidth", partial(limits.bandwidth, settings))
    peak = record.measure("peak", partial(limits.peak, settings))
    release()
    nan = float("nan")
    return read["read_bytes_per_s"] if read else nan, peak["flop_per_s"] if peak else nan


def prefill(subject: Subject, peak_flop_per_s: float) -> dict[str, Any]:
    """A whole prompt in one step: seconds including the host's, and the share of cuBLAS's rate.

    `ms` is measured once the step has its graph, if it can have one, `eager_ms` before that.
    `mfu` counts linears and causal attention; `linear_mfu` counts only linears.
    """
    found = {}
    runner = subject.runner
    for tokens in subject.settings.prefills:
        plan = prefill_plan(subject, tokens)
        runner.execute(plan)  # kernels of this size are loaded
        eager = _median_seconds(runner, plan)
        num_eager = sum(runner.eager_steps.values())  # 0 where graphs are not used
        while runner.use_idle_time():  # captures the graph
            pass
        took = _median_seconds(runner, plan)
        flops = prefill_flops(subject.config, tokens)
        found[str(tokens)] = {
            "ms": took * 1e3,
            "eager_ms": eager * 1e3,
            "in_graph": 0 < num_eager == sum(runner.eager_steps.values()),
            "tokens_per_s": tokens / took,
            "mfu": sum(flops.values()) / took / peak_flop_per_s,
            "linear_mfu": flops["linear"] / took / peak_flop_per_s,
        }
        runner.launch(StepPlan(step=0, work=(), released_rows=(0,)))
    return found


def _median_seconds(runner: ModelRunner, plan: StepPlan) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        runner.execute(plan)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def mixed(subject: Subject) -> dict[str, Any]:
    """Requests of many lengths, all sent at once: output tokens per second, padding, waste."""
    settings, gen = subject.settings, random.Random(1)
    core = subject.core(subject.runner)
    compiles = subject.runner.num_runtime_compiles
    padded, rows = subject.runner.buckets.num_padding, subject.runner.buckets.num_rows
    total_in = total_out = 0
    start = time.perf_counter()
    for i in range(settings.mixed_requests):
        prompt = subject.prompts(1, gen.randint(*settings.mixed_prompt))[0]
        output = gen.randint(*settings.mixed_output)
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        core.add(AddRequest(request_id=str(i), prompt_token_ids=prompt, sampling=params))
        total_in, total_out = total_in + len(prompt), total_out + output
    serve(core, total_out)
    took = time.perf_counter() - start
    buckets = subject.runner.buckets
    decoded = buckets.num_rows - rows
    return {
        "requests": settings.mixed_requests,
        "seconds": took,
        "input_tokens": total_in,
        "output_tokens": total_out,
        "output_tokens_per_s": total_out / took,
        "total_tokens_per_s": (total_in + total_out) / took,
        "steps": core.stats().num_steps,
        "padded_rows_share": (buckets.num_padding - padded) / decoded if decoded else 0.0,
        "wasted_row_steps": core.stats().num_wasted_row_steps,
        "runtime_compiles": subject.runner.num_runtime_compiles - compiles,
    }
