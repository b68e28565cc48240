"""Reports results: the text block known from vLLM, a JSON file, a plot."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import ConfigError
from llmc.load_test.metrics import METRICS, BenchMetrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 50
Row = tuple[str, str]


def serving_rows(
    metrics: BenchMetrics, *, max_concurrency: int | None, request_rate: float
) -> list[Row]:
    """(label, value) pairs at the top of the block, with the labels of `vllm bench serve`."""
    rows = [("Successful requests:", str(metrics.completed))]
    rows.append(("Failed requests:", str(metrics.failed)))
    if max_concurrency is not None:
        rows.append(("Maximum request concurrency:", str(max_concurrency)))
    if request_rate != float("inf"):
        rows.append(("Request rate configured (RPS):", f"{request_rate:.2f}"))
    rows += [
        ("Benchmark duration (s):", f"{metrics.duration_s:.2f}"),
        ("Total input tokens:", str(metrics.total_input_tokens)),
        ("Total generated tokens:", str(metrics.total_output_tokens)),
        ("Request throughput (req/s):", f"{metrics.request_throughput:.2f}"),
    ]
    if metrics.request_goodput is not None:
        rows.append(("Request goodput (req/s):", f"{metrics.request_goodput:.2f}"))
    rows += [
        ("Output token throughput (tok/s):", f"{metrics.output_throughput:.2f}"),
        ("Peak output token throughput (tok/s):", f"{metrics.max_output_tokens_per_s:.2f}"),
        ("Peak concurrent requests:", f"{metrics.max_concurrent_requests:.2f}"),
        ("Total token throughput (tok/s):", f"{metrics.total_token_throughput:.2f}"),
    ]
    return rows


def latency_sections(metrics: BenchMetrics, names: Sequence[str]) -> list[tuple[str, list[Row]]]:
    """(heading, rows) for each metric in `names`."""
    sections = []
    for name in names:
        found, label = metrics.distributions[name], name.upper()
        rows = [
            (f"Mean {label} (ms):", f"{found.mean:.2f}"),
            (f"Median {label} (ms):", f"{found.median:.2f}"),
        ]
        rows += [(f"P{p:g} {label} (ms):", f"{v:.2f}") for p, v in found.percentiles.items()]
        sections.append((METRICS[name], rows))
    return sections


def format_block(title: str, sections: Sequence[tuple[str | None, Sequence[Row]]]) -> str:
    """The block as vLLM prints it: between `=` rules, with a heading in a `-` rule per section."""
    lines = [f"{' ' + title + ' ':=^{WIDTH}}"]
    for heading, rows in sections:
        if heading is not None:
            lines.append(f"{heading:-^{WIDTH}}")
        lines += [f"{label:<40} {value:<10}".rstrip() for label, value in rows]
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def context(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The date and the command, for every JSON result."""
    words = list(sys.argv if argv is None else argv)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if argv is None and spec is not None:  # started as `python -m module`
        words[:1] = ["python", "-m", spec.name.removesuffix(".__main__")]
    else:
        words[0] = Path(words[0]).name
    now = datetime.now(UTC)
    return {"date": now.strftime("%Y%m%d-%H%M%S"), "command": shlex.join(words)}


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write to a temporary file and rename it, so that readers never see a partial file."""
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".part")
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes it private; a result is not secret
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_can_write(*paths: Path | None) -> None:
    """Raise ConfigError before the benchmark runs rather than after it."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"can't write {path}: it is a directory")
        if not path.parent.is_dir():
            raise ConfigError(f"can't write {path}: the directory {path.parent} does not exist")


def check_can_plot() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; "
            "install it with `pip install matplotlib` or leave --plot out"
        ) from error


def write_plot(path: Path, title: str, samples_ms: Mapping[str, Sequence[float]]) -> None:
    """One panel per metric: its cumulative distribution, with median and 99th percentile marked."""
    draw_plot(title, samples_ms).savefig(path, dpi=120)


def draw_plot(title: str, samples_ms: Mapping[str, Sequence[float]]) -> Figure:
    """The figure of `write_plot`."""
    check_can_plot()
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    shown = {name: sorted(values) for name, values in samples_ms.items() if len(values) > 0}
    if not shown:
        raise ConfigError("there is nothing to plot: no request succeeded")
    figure = Figure(figsize=(4.2 * len(shown), 3.6), layout="constrained")
    figure.suptitle("\n".join(textwrap.wrap(title, int(50 * len(shown)))))
    for axes, (name, values) in zip(
        figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True
    ):
        share = [(i + 1) / len(values) for i in range(len(values))]
        axes.step(values, share, where="post", color="#2563a8")
        middle = sum(axes.get_xlim()) / 2
        # at different heights, as the two may be equal, and inside the panel
        for level, style, height in ((0.5, "--", 0.02), (0.99, ":", 0.52)):
            value = values[min(len(values) - 1, int(level * len(values)))]
            axes.axvline(value, linestyle=style, color="#666666", linewidth=1)
            axes.annotate(
                f"p{level * 100:g}: {value:.1f}",
                (value, height),
                rotation=90,
                fontsize=8,
                ha="right" if value > middle else "left",
                va="bottom",
            )
        axes.set_title(METRICS.get(name, name), fontsize=10)
        axes.set_xlabel(f"{name.upper()} (ms)")
        axes.set_ylabel("share of samples")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    return figure
