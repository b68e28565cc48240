"""`llmc bench explain` after its flags: load, time the ops of a step, report."""

from __future__ import annotations

from llmc.cli.bench_options import Output
from llmc.cli.bench_run import about, check_before_loading
from llmc.cli.bench_show import progress_bar, write_result
from llmc.cli.console import note, stderr_console
from llmc.cli.loading import load_engine
from llmc.config import EngineConfig
from llmc.errors import ConfigError, LlmcError
from llmc.load_test import machine
from llmc.load_test.explain import Limits, explain_steps
from llmc.load_test.explain_report import format_limits, format_table, write_explain_plot


def run_explain(
    config: EngineConfig,
    output: Output,
    *,
    batch_size: int,
    context_len: int,
    input_len: int,
    num_iters: int,
) -> None:
    check_before_loading(output)
    for flag, value, least in (
        ("--batch-size", batch_size, 1),
        ("--context-len", context_len, 2),
        ("--input-len", input_len, 2),
        ("--num-iters", num_iters, 1),
    ):
        if value < least:
            raise ConfigError(f"{flag} must be at least {least}, got {value}")
    if batch_size > config.max_num_seqs:
        raise ConfigError(
            f"--batch-size {batch_size} exceeds --max-num-seqs {config.max_num_seqs}: "
            "the batch would not run in one step"
        )
    if config.speculative_config is not None:
        raise ConfigError(
            "only steps without draft tokens can be explained: remove --speculative-config"
        )
    started = load_engine(config, stderr_console())
    if started.upgrade is not None and not started.upgrade.wait():
        raise LlmcError(f"compiling the step failed: {started.upgrade.error}")
    info = started.info

    def limits() -> Limits:
        return Limits(
            bytes_per_s=machine.measure_read_bandwidth(info.device),
            operations_per_s=machine.measure_product_rate(info.device, info.dtype),
        )

    with progress_bar("runs", 4) as advance:
        found = explain_steps(
            started,
            batch_size=batch_size,
            context_len=context_len,
            input_len=input_len,
            num_iters=num_iters,
            limits=limits,
            advance=advance,
        )
    for explained in found:
        print(format_table(explained), end="\n\n")
    print(format_limits(found[0]))
    decode, prompt = found
    write_result(
        output,
        {
            **about(config, info),
            "read_bandwidth_bytes_per_s": decode.limits.bytes_per_s,
            "product_flop_per_s": decode.limits.operations_per_s,
            "decode": decode.as_json(),
            "prefill": prompt.as_json(),
        },
    )
    if output.plot is not None:
        write_explain_plot(output.plot, f"{info.name}, {info.dtype} on {info.device}", found)
        note(stderr_console(), f"plot written to {output.plot}")
