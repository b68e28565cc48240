"""`llmc bench throughput` and `latency` after their flags: load, warm up, measure, report."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.cli.bench_options import Output, Workload
from llmc.cli.bench_show import progress_bar, write_files
from llmc.cli.console import stderr_console
from llmc.cli.loading import load_engine
from llmc.config import EngineConfig
from llmc.errors import ConfigError, LlmcError
from llmc.load_test import machine, report
from llmc.load_test.metrics import RequestTrace, compute_metrics, parse_percentiles
from llmc.load_test.offline import (
    DecodeSteps,
    OfflineRun,
    bandwidth_result,
    check_fits,
    run_offline,
    speculation_result,
    usable_token_ids,
)
from llmc.load_test.workloads import BenchRequest, load_dataset, random_workload, text_workload
from llmc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo
    from llmc.text.tokenizer import Tokenizer

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)
MIB = 2**20


def run_throughput(
    config: EngineConfig,
    workload: Workload,
    output: Output,
    *,
    temperature: float,
    ignore_eos: bool,
    num_warmups: int,
) -> None:
    percentiles = parse_percentiles(output.percentiles)
    check_before_loading(output, num_warmups=num_warmups)
    sampling = SamplingParams(temperature=temperature, ignore_eos=ignore_eos, seed=None)
    started = load_engine(config, stderr_console())
    requests = _requests(config, workload, started.info)
    check_fits(requests, started.info)
    warmups = _warmups(requests, started.info, num_warmups, config.seed)
    if warmups:
        with progress_bar("warm-up", len(warmups)) as advance:
            run_offline(started.engine, warmups, sampling, advance)
    before = started.engine.stats()
    with progress_bar("requests", len(requests)) as advance:
        run = run_offline(started.engine, requests, sampling, advance)
    speculation = speculation_result(before, started.engine.stats())
    _refuse_failures(run)

    metrics = compute_metrics(run.traces, run.duration_s, percentiles=percentiles)
    memory = _memory()
    bytes_per_s = _read_bandwidth(output, started.info)
    rows = report.serving_rows(metrics, max_concurrency=None, request_rate=float("inf"))
    rows += _speculation_rows(config, speculation)
    sections = [(None, rows), *report.latency_sections(metrics, ["ttft", "tpot", "itl", "e2el"])]
    sections.append(("Machine", _machine_rows(run.decode, started.info, bytes_per_s, memory)))
    print(report.format_block("Throughput Benchmark Result", sections))
    print(
        f"Throughput: {metrics.request_throughput:.2f} requests/s, "
        f"{metrics.total_token_throughput:.2f} total tokens/s, "
        f"{metrics.output_throughput:.2f} output tokens/s"
    )
    result = {
        **about(config, started.info),
        "elapsed_time": run.duration_s,
        "num_requests": len(requests),
        "total_num_tokens": metrics.total_input_tokens + metrics.total_output_tokens,
        "requests_per_second": metrics.request_throughput,
        "tokens_per_second": metrics.total_token_throughput,
        **metrics.as_json(),
        **bandwidth_result(run.decode, started.info, bytes_per_s),
        **speculation,
        **memory,
    }
    write_files(output, result, run.traces, title=f"throughput of {started.info.name}")


def run_latency(
    config: EngineConfig,
    workload: Workload,
    output: Output,
    *,
    temperature: float,
    num_iters: int,
    num_iters_warmup: int,
) -> None:
    if num_iters < 1:
        raise ConfigError(f"--num-iters must be at least 1, got {num_iters}")
    check_before_loading(output, num_iters_warmup=num_iters_warmup)
    sampling = SamplingParams(temperature=temperature, ignore_eos=True)
    if workload.num_prompts > config.max_num_seqs:
        raise ConfigError(
            f"--batch-size {workload.num_prompts} exceeds --max-num-seqs {config.max_num_seqs}: "
            "the batch would not run in one step"
        )
    started = load_engine(config, stderr_console())
    runs: list[OfflineRun] = []
    # New prompts each time: a prompt sent twice would come from the prefix cache.
    batch, skipped = workload.num_prompts, num_iters_warmup
    drawn = dataclasses.replace(workload, num_prompts=batch * (skipped + num_iters))
    every = _requests(config, drawn, started.info)
    check_fits(every, started.info)
    before = started.engine.stats()
    with progress_bar("batches", num_iters_warmup + num_iters) as advance:
        for number in range(num_iters_warmup + num_iters):
            requests = every[number * batch : (number + 1) * batch]
            runs.append(run_offline(started.engine, requests, sampling))
            _refuse_failures(runs[-1])
            advance()
    measured = runs[num_iters_warmup:]
    speculation = speculation_result(before, started.engine.stats())
    seconds = [run.duration_s for run in measured]
    decode = _sum_steps([run.decode for run in measured])
    memory = _memory()
    bytes_per_s = _read_bandwidth(output, started.info)
    found = {p: float(np.percentile(seconds, p)) for p in LATENCY_PERCENTILES}
    print(f"Avg latency: {np.mean(seconds):.6f} seconds")
    for percentile, value in found.items():
        print(f"{percentile}% percentile latency: {value:.6f} seconds")
    rows = _machine_rows(decode, started.info, bytes_per_s, memory)
    rows += _speculation_rows(config, speculation)
    print(report.format_block("Machine", [(None, rows)]))
    traces = [trace for run in measured for trace in run.traces]
    result = {
        **about(config, started.info),
        "batch_size": workload.num_prompts,
        "input_len": round(float(np.mean([r.prompt_len or 0 for r in every[batch * skipped :]]))),
        "output_len": workload.random_output_len,
        "avg_latency": float(np.mean(seconds)),
        "latencies": seconds,
        "percentiles": {str(p): value for p, value in found.items()},
        **_latency_keys(traces, sum(seconds)),
        **bandwidth_result(decode, started.info, bytes_per_s),
        **speculation,
        **memory,
    }
    write_files(output, result, traces, title=f"latency of {started.info.name}")


def _latency_keys(traces: Sequence[RequestTrace], seconds: float) -> dict[str, float]:
    distributions = compute_metrics(traces, seconds).distributions
    return {key: v for name, d in distributions.items() for key, v in d.keys(name).items()}


def check_before_loading(output: Output, **counts: int) -> None:
    """Reject invalid options before loading the model."""
    for name, count in counts.items():
        if count < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 0, got {count}")
    report.check_can_write(output.json, output.plot)
    if output.plot is not None:
        report.check_can_plot()


def _requests(config: EngineConfig, workload: Workload, info: ModelInfo) -> list[BenchRequest]:
    encode = _lazy_encoder(config, info)
    if workload.is_text and info.tokenizer_path is not None:
        texts = text_workload(
            num_prompts=workload.num_prompts,
            output_len=workload.random_output_len,
            range_ratio=workload.range_ratio,
            seed=workload.seed,
        )
        return [_cut_to_fit(r, encode(r.text or ""), info.max_model_len) for r in texts]
    if workload.dataset is None:
        return random_workload(
            num_prompts=workload.num_prompts,
            input_len=workload.random_input_len,
            output_len=workload.random_output_len,
            token_ids=usable_token_ids(info),
            range_ratio=workload.range_ratio,
            prefix_len=workload.prefix_len,
            seed=workload.seed,
        )
    requests = load_dataset(
        workload.dataset,
        num_prompts=workload.num_prompts,
        count_tokens=lambda text: len(encode(text)),
        output_len=workload.output_len,
        seed=workload.seed,
    )
    return [
        r
        if r.token_ids is not None
        else dataclasses.replace(r, token_ids=tuple(encode(r.text or "")))
        for r in requests
    ]


def _cut_to_fit(request: BenchRequest, ids: list[int], limit: int) -> BenchRequest:
    kept = tuple(ids[: max(1, limit - request.output_len)])
    return dataclasses.replace(request, token_ids=kept, prompt_len=len(kept))


def _lazy_encoder(config: EngineConfig, info: ModelInfo) -> Callable[[str], list[int]]:
    """Text -> ids. Loads the tokenizer at the first text, since a dataset may not have any."""

    @functools.cache
    def tokenizer() -> Tokenizer:
        if info.tokenizer_path is None:
            raise ConfigError(f"{info.name} has no tokenizer, which a text dataset needs")
        from llmc.text.tokenizer import Tokenizer

        return Tokenizer.load(info.tokenizer_path, trust_remote_code=config.trust_remote_code)

    return lambda text: tokenizer().encode(text)


def _warmups(
    requests: Sequence[BenchRequest], info: ModelInfo, count: int, seed: int
) -> list[BenchRequest]:
    """Requests as long as the first `count`, with other tokens to avoid prefix cache hits."""
    allowed = np.asarray(usable_token_ids(info))
    rng = np.random.default_rng(seed + 1)
    return [
        dataclasses.replace(
            request,
            token_ids=tuple(int(t) for t in rng.choice(allowed, len(request.token_ids or ()))),
        )
        for request in requests[:count]
    ]


def _refuse_failures(run: OfflineRun) -> None:
    errors = [trace.error for trace in run.traces if trace.error is not None]
    if errors:
        raise LlmcError(f"{len(errors)} of {len(run.traces)} requests failed: {errors[0]}")


def _sum_steps(parts: Sequence[DecodeSteps]) -> DecodeSteps:
    return DecodeSteps(
        num_steps=sum(p.num_steps for p in parts),
        seconds=sum(p.seconds for p in parts),
        num_tokens=sum(p.num_tokens for p in parts),
        context_tokens=sum(p.context_tokens for p in parts),
    )


def _memory() -> dict[str, int | None]:
    return {
        "peak_rss_bytes": machine.peak_rss_bytes(),
        "peak_cuda_bytes": machine.peak_cuda_bytes(),
    }


def _read_bandwidth(output: Output, info: ModelInfo) -> float | None:
    """Measure the bandwidth; call this last, so its buffer is not counted as engine memory."""
    return machine.measure_read_bandwidth(info.device) if output.bandwidth else None


def _machine_rows(
    decode: DecodeSteps,
    info: ModelInfo,
    bytes_per_s: float | None,
    memory: Mapping[str, int | None],
) -> list[report.Row]:
    rows = []
    if decode.num_steps:
        rows.append(("Mean decode step (ms):", f"{decode.mean_ms:.2f}"))
        rows.append(("Mean decode batch:", f"{decode.num_tokens / decode.num_steps:.2f}"))
    if bytes_per_s is not None:
        rows.append(("Read bandwidth, measured (GB/s):", f"{bytes_per_s / 1e9:.2f}"))
        share = decode.share_of_bandwidth(info, bytes_per_s)
        if share is not None:
            rows.append(("Share reached by decoding (%):", f"{share * 100:.1f}"))
    for label, key in (
        ("Peak memory (MiB):", "peak_rss_bytes"),
        ("Peak GPU memory (MiB):", "peak_cuda_bytes"),
    ):
        size = memory[key]
        if size is not None:
            rows.append((label, f"{size / MIB:.0f}"))
    return rows


def _speculation_rows(config: EngineConfig, counts: Mapping[str, int]) -> list[report.Row]:
    if config.speculative_config is None:
        return []
    drafted, accepted = counts["num_draft_tokens"], counts["num_accepted_tokens"]
    length = 1 + accepted / max(1, counts["num_drafts"])
    return [
        ("Draft tokens:", str(drafted)),
        ("Accepted draft tokens (%):", f"{accepted / max(1, drafted) * 100:.1f}"),
        ("Mean acceptance length (tokens per step with draft tokens):", f"{length:.2f}"),
    ]


def about(config: EngineConfig, info: ModelInfo) -> dict[str, Any]:
    settings = dataclasses.asdict(config)
    settings["passes"] = dict(settings["passes"])
    return {
        **report.context(),
        "model_id": info.name,
        "dtype": info.dtype,
        "device": info.device,
        "engine_config": settings,
    }
