"""Output shared by the benchmarks: a progress bar, the JSON and the plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from llmc.cli.bench_options import Output
from llmc.cli.console import note, stderr_console
from llmc.load_test import report
from llmc.load_test.machine import describe_machine, package_versions
from llmc.load_test.metrics import RequestTrace, samples_s


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call once per finished item. Draws nothing if not on a terminal."""
    console = stderr_console()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def write_result(output: Output, result: Mapping[str, Any]) -> None:
    if output.json is not None:
        about = {"versions": package_versions(), "machine": describe_machine()}
        report.write_json(output.json, {**result, **about})
        note(stderr_console(), f"result written to {output.json}")


def write_files(
    output: Output, result: Mapping[str, Any], traces: Sequence[RequestTrace], title: str
) -> None:
    write_result(output, result)
    if output.plot is not None:
        samples_ms = {k: [s * 1e3 for s in values] for k, values in samples_s(traces).items()}
        report.write_plot(output.plot, title, samples_ms)
        note(stderr_console(), f"plot written to {output.plot}")
