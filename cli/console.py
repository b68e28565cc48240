"""Messages that commands print on stderr: startup phases, notes, banners.

Rich decides about color: none when stderr is not a terminal or NO_COLOR is set. Without a
terminal, phases are plain lines without a spinner, so that logs stay readable.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from llmc.model_info import OnPhase, Phase, PhaseBegins

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo
    from llmc.pooling import PoolingInfo

NAME_WIDTH = 20


def stderr_console() -> Console:
    """Wrap at words on a terminal; elsewhere keep lines whole, for programs that read them."""
    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def stdout_console() -> Console:
    """For results. Without a terminal, tables are as wide as needed."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=120)


def plain_table(*heads: str, left: int = 1) -> Table:
    """A table without lines: the first `left` columns are text, the others numbers.

    On a narrow terminal, text is folded, but numbers never are.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for i, head in enumerate(heads):
        is_text = i < left
        table.add_column(
            head,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
        )
    return table


def print_table(console: Console, table: Table) -> None:
    """Print indented by two; to a file or a pipe, without trailing blanks."""
    padded = Padding(table, (0, 0, 0, 2), expand=False)
    if console.is_terminal:
        console.print(padded)
        return
    with console.capture() as captured:
        console.print(padded)
    for line in captured.get().splitlines():
        console.print(line.rstrip(), markup=False)


@contextmanager
def phases(console: Console, *, quiet: bool = False) -> Iterator[OnPhase]:
    """Yield the `on_phase` callback of an engine start: a line per phase, a spinner between."""
    if quiet:
        yield lambda phase: None
        return
    if not console.is_terminal:

        def print_line(phase: PhaseBegins | Phase) -> None:
            if isinstance(phase, Phase):
                console.print(_phase_line(phase), markup=False)

        yield print_line
    else:
        running = _Running()
        with console.status(running, spinner="dots") as status:

            def print_row(phase: PhaseBegins | Phase) -> None:
                if isinstance(phase, Phase):
                    status.console.print(Text("  ") + Text(_phase_line(phase), style="dim"))
                else:
                    running.name = phase.name

            yield print_row


class _Running:
    """Says what runs and for how long: a renderable that is new at each refresh of a spinner."""

    def __init__(self) -> None:
        self.name = "starting"
        self._start = time.perf_counter()

    def __rich__(self) -> Text:
        return Text(f"{self.name}, {time.perf_counter() - self._start:.0f} s so far")


def spinner(console: Console, text: str) -> AbstractContextManager[object]:
    """A spinner on a terminal; elsewhere nothing."""
    return console.status(text, spinner="dots") if console.is_terminal else nullcontext()


def _phase_line(phase: Phase) -> str:
    return f"{phase.name:<{NAME_WIDTH}} {phase.seconds:7.2f} s  {phase.detail}".rstrip()


def note(console: Console, text: str, style: str = "dim") -> None:
    """Print text without interpreting markup, since it can come from a model."""
    console.print(text, style=style, markup=False)


def banner(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a title and aligned (name, value) lines; plain text without a terminal."""
    if not console.is_terminal:
        console.print(title, markup=False)
        for name, value in rows:
            console.print(f"  {name:<{NAME_WIDTH}} {value}", markup=False)
        return
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text("  " + name, style="dim"), Text(value))
    console.print()
    console.print(Text("  " + title, style="bold"))
    console.print(table)
    console.print()


def about_model(info: ModelInfo) -> str:
    """A model's name, size and limits on one line."""
    size = f"{info.weight_bytes / 2**20:,.0f} MiB of weights"
    line = f"{info.name}: {size}, {info.dtype} on {info.device}, {info.max_model_len:,} tokens"
    return f"{line}. Small: often wrong about facts" if info.is_default else line


def _task(pooling: PoolingInfo) -> str:
    if pooling.classifies:
        return f"{pooling.task}, {pooling.size} label{'s' if pooling.size > 1 else ''}"
    how = "normalized" if pooling.normalize else "not normalized"
    pooled = "of each token" if pooling.of_tokens else f"{pooling.method} pooling"
    return f"{pooling.task}, {pooling.size} values, {pooled}, {how}"


def model_rows(info: ModelInfo) -> list[tuple[str, str]]:
    """The banner rows for a loaded model."""
    concurrency = info.num_blocks / info.blocks_per_request
    pooling = info.pooling
    return [
        *([] if pooling is None else [("task", _task(pooling))]),
        ("model", f"{info.name} ({info.weight_bytes / 2**20:,.0f} MiB, {info.dtype})"),
        ("device", info.device),
        ("context", f"{info.max_model_len:,} tokens"),
        ("KV cache size", f"{concurrency * info.max_model_len:,.0f} tokens"),
        (
            "maximum concurrency",
            f"{concurrency:.2f}x for {info.max_model_len:,} tokens per request",
        ),
    ]
