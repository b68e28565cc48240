"""`llmc bench serve` after flag parsing: prompts, the run, the printed block, the files."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from llmc.cli.bench_options import Output, Workload
from llmc.cli.bench_show import progress_bar, write_files
from llmc.cli.console import note, stderr_console
from llmc.errors import ConfigError
from llmc.load_test import metrics as bench_metrics
from llmc.load_test import report
from llmc.load_test.client import Target
from llmc.load_test.metrics import BenchMetrics, RequestTrace
from llmc.load_test.prompts import random_prompts
from llmc.load_test.serving import Load, find_model, run_load
from llmc.load_test.workloads import BenchRequest, load_dataset, text_workload

if TYPE_CHECKING:
    from llmc.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeRun:
    """The flags of `llmc bench serve` that are not about prompts or files."""

    base_url: str
    backend: str
    endpoint: str | None
    model: str | None
    tokenizer: str | None
    api_key: str | None
    wait_s: float
    temperature: float | None
    ignore_eos: bool
    extra_body: str | None
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    num_warmups: int
    percentile_metrics: str
    goodput: tuple[str, ...]
    save_detailed: bool


def run_serve(run: ServeRun, workload: Workload, output: Output) -> None:
    names = bench_metrics.parse_metric_names(run.percentile_metrics)
    percentiles = bench_metrics.parse_percentiles(output.percentiles)
    goodput = bench_metrics.parse_goodput(run.goodput)
    report.check_can_write(output.json, output.plot)
    if output.plot is not None:
        report.check_can_plot()
    load = Load(
        request_rate=run.request_rate,
        burstiness=run.burstiness,
        max_concurrency=run.max_concurrency,
        seed=workload.seed,
    )
    if run.num_warmups < 0:
        raise ConfigError(f"--num-warmups must be at least 0, got {run.num_warmups}")
    target, traces, duration_s = asyncio.run(_measure(run, workload, load))
    metrics = bench_metrics.compute_metrics(
        traces, duration_s, percentiles=percentiles, goodput_ms=goodput
    )
    _print_block(metrics, names, load)
    _explain_failures(traces)
    result = _result(run, workload, target, metrics, traces)
    write_files(output, result, traces, title=f"{target.model} at {target.base_url}")
    if metrics.completed == 0:
        raise ConfigError("no request succeeded; the first failure is above")


async def _measure(
    run: ServeRun, workload: Workload, load: Load
) -> tuple[Target, list[RequestTrace], float]:
    target = Target(
        base_url=run.base_url,
        backend=run.backend,
        endpoint=run.endpoint,
        api_key=run.api_key,
        temperature=run.temperature,
        ignore_eos=run.ignore_eos,
        extra_body=_read_extra_body(run.extra_body),
    )
    served = run.model or await find_model(target, run.wait_s)
    target = dataclasses.replace(target, model=served)
    requests = await _prompts(run, workload, target)
    warmups, measured = requests[workload.num_prompts :], requests[: workload.num_prompts]
    warmups = (warmups or measured)[: run.num_warmups]
    note(
        stderr_console(),
        f"{len(measured)} requests to {target.base_url}{target.path}, model {target.model}",
    )
    with progress_bar("requests", len(measured)) as advance:
        traces, duration_s = await run_load(
            target, load, measured, warmups=warmups, on_done=lambda trace: advance()
        )
    return target, traces, duration_s


async def _prompts(run: ServeRun, workload: Workload, target: Target) -> list[BenchRequest]:
    """The measured requests, then different ones for warm-up (a repeated prompt hits the cache)."""
    tokenizer = _load_tokenizer(run.tokenizer)
    wanted = workload.num_prompts + run.num_warmups
    if workload.dataset is not None:
        count = None if tokenizer is None else (lambda text: len(tokenizer.encode(text)))
        return load_dataset(
            workload.dataset,
            num_prompts=wanted,
            count_tokens=count,
            output_len=workload.output_len,
            seed=workload.seed,
        )
    if workload.is_text:
        return text_workload(
            num_prompts=wanted,
            output_len=workload.random_output_len,
            range_ratio=workload.range_ratio,
            seed=workload.seed,
        )
    return await random_prompts(
        target,
        num_prompts=wanted,
        input_len=workload.random_input_len,
        output_len=workload.random_output_len,
        range_ratio=workload.range_ratio,
        prefix_len=workload.prefix_len,
        seed=workload.seed,
        tokenizer=tokenizer,
    )


def _load_tokenizer(path: str | None) -> Tokenizer | None:
    if path is None:
        return None
    from llmc.text.tokenizer import Tokenizer

    return Tokenizer.load(path)


def _read_extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--extra-body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {text!r:.60}")
    return value


def _print_block(metrics: BenchMetrics, names: list[str], load: Load) -> None:
    rows = report.serving_rows(
        metrics, max_concurrency=load.max_concurrency, request_rate=load.request_rate
    )
    sections = [(None, rows), *report.latency_sections(metrics, names)]
    print(report.format_block("Serving Benchmark Result", sections))


def _explain_failures(traces: list[RequestTrace]) -> None:
    errors = [trace.error for trace in traces if trace.error is not None]
    if errors:
        note(stderr_console(), f"{len(errors)} requests failed; the first: {errors[0]}", "yellow")


def _result(
    run: ServeRun,
    workload: Workload,
    target: Target,
    metrics: BenchMetrics,
    traces: list[RequestTrace],
) -> dict[str, Any]:
    result: dict[str, Any] = {
        **report.context(),
        "backend": run.backend,
        "endpoint_type": run.backend,
        "base_url": target.base_url,
        "model_id": target.model,
        "tokenizer_id": run.tokenizer or target.model,
        "num_prompts": len(traces),
        # JSON has no infinity; vLLM writes this word too.
        "request_rate": run.request_rate if math.isfinite(run.request_rate) else "inf",
        "burstiness": run.burstiness,
        "max_concurrency": run.max_concurrency,
        "seed": workload.seed,
        **metrics.as_json(),
    }
    if run.save_detailed:
        done = [trace for trace in traces if trace.token_times_s]
        result |= {
            "input_lens": [trace.prompt_tokens for trace in traces],
            "output_lens": [trace.output_tokens for trace in traces],
            "ttfts": [trace.ttft_s for trace in done],
            "itls": [trace.itls_s for trace in done],
            "generated_texts": [trace.text for trace in traces],
            "errors": [trace.error or "" for trace in traces],
        }
    return result
