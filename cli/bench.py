"""`llmc bench throughput|latency|explain|serve`: flags only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from llmc.cli.bench_options import (
    RESULT,
    WORKLOAD,
    Bandwidth,
    DatasetPath,
    InputLen,
    NumPrompts,
    Output,
    OutputJson,
    OutputLen,
    Percentiles,
    Plot,
    PrefixLen,
    RangeRatio,
    Temperature,
    Workload,
)
from llmc.cli.help import HelpCommand
from llmc.cli.options import engine_options, option
from llmc.config import EngineConfig

LOAD = "Load"
SERVER = "Server"

app = typer.Typer(
    rich_markup_mode=None,
    help="Measure speed: of the engine in this process, or of any OpenAI-compatible server.",
    no_args_is_help=True,
)


@app.command("throughput", cls=HelpCommand)
@engine_options()
def throughput(
    config: EngineConfig,
    num_prompts: NumPrompts = 64,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    range_ratio: RangeRatio = 0.0,
    prefix_len: PrefixLen = 0,
    dataset: DatasetPath = None,
    temperature: Temperature = 1.0,
    ignore_eos: Annotated[
        bool,
        option(
            "--ignore-eos/--no-ignore-eos",
            help="Generate the full output length, past the model's end token.",
            panel=WORKLOAD,
        ),
    ] = True,
    num_warmups: Annotated[
        int,
        option(
            "--num-warmups",
            help="Requests to send before measuring.",
            metavar="REQUESTS",
            panel=WORKLOAD,
        ),
    ] = 8,
    bandwidth: Bandwidth = True,
    percentiles: Percentiles = "90,99",
    output_json: OutputJson = None,
    plot: Plot = None,
) -> None:
    """Send all requests at once and measure how many tokens are generated per second."""
    from llmc.cli.bench_run import run_throughput

    workload = Workload(
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        prefix_len=prefix_len,
        dataset=dataset,
        seed=config.seed,
    )
    output = Output(json=output_json, plot=plot, percentiles=percentiles, bandwidth=bandwidth)
    run_throughput(
        config,
        workload,
        output,
        temperature=1.0 if temperature is None else temperature,
        ignore_eos=ignore_eos,
        num_warmups=num_warmups,
    )


@app.command("latency", cls=HelpCommand)
@engine_options()
def latency(
    config: EngineConfig,
    batch_size: Annotated[
        int,
        option("--batch-size", help="Requests per batch.", metavar="REQUESTS", panel=WORKLOAD),
    ] = 8,
    input_len: InputLen = None,
    output_len: Annotated[
        int, option("--output-len", help="Output tokens.", metavar="TOKENS", panel=WORKLOAD)
    ] = 128,
    num_iters: Annotated[
        int, option("--num-iters", help="Batches to measure.", metavar="BATCHES", panel=WORKLOAD)
    ] = 10,
    num_iters_warmup: Annotated[
        int,
        option(
            "--num-iters-warmup",
            help="Batches to run before measuring.",
            metavar="BATCHES",
            panel=WORKLOAD,
        ),
    ] = 3,
    temperature: Temperature = 1.0,
    bandwidth: Bandwidth = True,
    output_json: OutputJson = None,
    plot: Plot = None,
) -> None:
    """Run one batch at a time and measure how long it takes."""
    from llmc.cli.bench_run import run_latency

    run_latency(
        config,
        Workload(
            num_prompts=batch_size,
            input_len=input_len,
            output_len=output_len,
            range_ratio=0.0,
            prefix_len=0,
            dataset=None,
            seed=config.seed,
        ),
        Output(json=output_json, plot=plot, percentiles="90,99", bandwidth=bandwidth),
        temperature=1.0 if temperature is None else temperature,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
    )


@app.command("explain", cls=HelpCommand)
@engine_options()
def explain(
    config: EngineConfig,
    batch_size: Annotated[
        int,
        option(
            "--batch-size",
            help="Requests in the decode step.",
            metavar="REQUESTS",
            panel=WORKLOAD,
        ),
    ] = 1,
    context_len: Annotated[
        int,
        option(
            "--context-len",
            help="Context length of each of them.",
            metavar="TOKENS",
            panel=WORKLOAD,
        ),
    ] = 512,
    input_len: Annotated[
        int,
        option("--input-len", help="Prompt length.", metavar="TOKENS", panel=WORKLOAD),
    ] = 512,
    num_iters: Annotated[
        int,
        option(
            "--num-iters",
            help="Number of decode steps, and of prompts, to measure.",
            metavar="STEPS",
            panel=WORKLOAD,
        ),
    ] = 10,
    output_json: OutputJson = None,
    plot: Annotated[
        Path | None,
        option("--plot", help="Plot the time of each op to this PNG file.", panel=RESULT),
    ] = None,
) -> None:
    """Show what bounds a step: the time, bytes and operations of each op, and the share of the
    machine's limits that it reaches.

    Covers a decode step and a prompt, as this engine computes them. An op timed alone takes
    slightly longer than within the step.
    """
    from llmc.cli.bench_explain import run_explain

    run_explain(
        config,
        Output(json=output_json, plot=plot, percentiles=""),
        batch_size=batch_size,
        context_len=context_len,
        input_len=input_len,
        num_iters=num_iters,
    )


@app.command("serve", cls=HelpCommand)
def serve(
    base_url: Annotated[
        str | None,
        option("--base-url", help="Server URL, instead of host and port.", panel=SERVER),
    ] = None,
    host: Annotated[str, option("--host", help="Server host.", panel=SERVER)] = "127.0.0.1",
    port: Annotated[
        int, option("--port", help="Server port.", metavar="PORT", panel=SERVER)
    ] = 8000,
    backend: Annotated[
        str,
        option(
            "--backend",
            help="openai: completions; openai-chat: chat completions.",
            panel=SERVER,
            metavar="[openai|openai-chat]",
        ),
    ] = "openai",
    endpoint: Annotated[
        str | None, option("--endpoint", help="Path of the API.", panel=SERVER)
    ] = None,
    model: Annotated[
        str | None,
        option("--model", help="Model to request. Default: the server's first.", panel=SERVER),
    ] = None,
    tokenizer: Annotated[
        str | None,
        option(
            "--tokenizer",
            help="Directory of the model's tokenizer. Without it, random prompts are made with the "
            "server's /tokenize, or from random words.",
            panel=SERVER,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        option(
            "--api-key",
            help="API key of the server.",
            panel=SERVER,
            envvar=["LLMC_API_KEY", "OPENAI_API_KEY"],
        ),
    ] = None,
    ready_check_timeout_sec: Annotated[
        float,
        option(
            "--ready-check-timeout-sec",
            help="Maximum time to wait for the server to become ready.",
            metavar="SECONDS",
            panel=SERVER,
        ),
    ] = 0.0,
    num_prompts: NumPrompts = 100,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    range_ratio: RangeRatio = 0.0,
    prefix_len: PrefixLen = 0,
    dataset: DatasetPath = None,
    seed: Annotated[
        int,
        option(
            "--seed",
            help="Seed for prompts and arrival times.",
            metavar="INTEGER",
            panel=WORKLOAD,
        ),
    ] = 0,
    temperature: Temperature = 0.0,
    ignore_eos: Annotated[
        bool,
        option("--ignore-eos", help="Request the full output length.", panel=WORKLOAD),
    ] = False,
    extra_body: Annotated[
        str | None,
        option("--extra-body", help="JSON object added to every request.", panel=WORKLOAD),
    ] = None,
    request_rate: Annotated[
        float,
        option(
            "--request-rate",
            help="Requests per second; inf sends all at once.",
            metavar="RATE",
            panel=LOAD,
        ),
    ] = math.inf,
    burstiness: Annotated[
        float,
        option(
            "--burstiness",
            metavar="FACTOR",
            help="Shape of the gamma distribution of the gaps: 1 is Poisson, lower is burstier.",
            panel=LOAD,
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        option(
            "--max-concurrency",
            help="Maximum number of requests in flight.",
            metavar="REQUESTS",
            panel=LOAD,
        ),
    ] = None,
    num_warmups: Annotated[
        int,
        option(
            "--num-warmups",
            help="Requests to send before measuring.",
            metavar="REQUESTS",
            panel=LOAD,
        ),
    ] = 1,
    percentile_metrics: Annotated[
        str,
        option("--percentile-metrics", help="Metrics to print.", panel=RESULT),
    ] = "ttft,tpot,itl,e2el",
    percentiles: Percentiles = "90,99",
    goodput: Annotated[
        list[str] | None,
        option(
            "--goodput",
            help="Latency limits in ms for a good request: ttft:200,tpot:50,e2el:2000.",
            panel=RESULT,
        ),
    ] = None,
    save_detailed: Annotated[
        bool,
        option("--save-detailed", help="Save each request's times and texts too.", panel=RESULT),
    ] = False,
    output_json: OutputJson = None,
    plot: Plot = None,
) -> None:
    """Send load to a running server over HTTP and time its streamed responses."""
    from llmc.cli.bench_serve import ServeRun, run_serve

    run_serve(
        ServeRun(
            base_url=base_url or f"http://{host}:{port}",
            backend=backend,
            endpoint=endpoint,
            model=model,
            tokenizer=tokenizer,
            api_key=api_key,
            wait_s=ready_check_timeout_sec,
            temperature=temperature,
            ignore_eos=ignore_eos,
            extra_body=extra_body,
            request_rate=request_rate,
            burstiness=burstiness,
            max_concurrency=max_concurrency,
            num_warmups=num_warmups,
            percentile_metrics=percentile_metrics,
            goodput=tuple(goodput or ()),
            save_detailed=save_detailed,
        ),
        Workload(
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len,
            range_ratio=range_ratio,
            prefix_len=prefix_len,
            dataset=dataset,
            seed=seed,
        ),
        Output(json=output_json, plot=plot, percentiles=percentiles),
    )
