"""What commands print about themselves, on stderr: start phases, notes, banners.

Rich decides about colour: none when stderr is not a terminal or NO_COLOR is set. Where nobody
watches, phases are plain lines without a spinner, so that logs stay readable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from llmc.start import ModelInfo, Phase

NAME_WIDTH = 20


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def phases(console: Console, *, quiet: bool = False) -> Iterator[Callable[[Phase], None]]:
    """Gives the `on_phase` callback of an engine start; one line each, a spinner between."""
    if quiet:
        yield lambda phase: None
        return
    total_s = 0.0
    if not console.is_terminal:

        def print_line(phase: Phase) -> None:
            nonlocal total_s
            total_s += phase.seconds
            console.print(_phase_line(phase), markup=False)

        yield print_line
    else:
        with console.status("starting", spinner="dots") as status:

            def print_row(phase: Phase) -> None:
                nonlocal total_s
                total_s += phase.seconds
                status.console.print(Text("  ") + Text(_phase_line(phase), style="dim"))
                status.update(f"starting, {total_s:.1f} s so far")

            yield print_row


def _phase_line(phase: Phase) -> str:
    return f"{phase.name:<{NAME_WIDTH}} {phase.seconds:7.2f} s  {phase.detail}".rstrip()


def note(console: Console, text: str, style: str = "dim") -> None:
    """Text of ours or of a model: never read as markup."""
    console.print(text, style=style, markup=False)


def banner(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """One title and aligned (name, value) lines; plain text where nobody watches."""
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


def model_rows(info: ModelInfo) -> list[tuple[str, str]]:
    """What a user wants to know of a loaded model."""
    tokens = info.num_blocks * info.block_size
    return [
        ("model", f"{info.name} ({info.weight_bytes / 2**20:,.0f} MiB, {info.dtype})"),
        ("device", info.device),
        ("context", f"{info.max_model_len:,} tokens"),
        ("KV cache size", f"{tokens:,} tokens"),
        (
            "maximum concurrency",
            f"{tokens / info.max_model_len:.2f}x for {info.max_model_len:,} tokens per request",
        ),
    ]
