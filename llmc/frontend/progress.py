"""A progress bar on stderr for long offline work; silent when stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOW_AFTER_S = 2.0


class GenerationProgress:
    """Requests done and tokens per second, shown once the work has lasted SHOW_AFTER_S."""

    def __init__(self, total: int, *, enabled: bool = True) -> None:
        self._total = total
        self._enabled = enabled and total > 0 and sys.stderr.isatty()
        self._started = time.monotonic()
        self._bar: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> GenerationProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar[0].stop()

    def update(self, done: int, num_tokens: int) -> None:
        if not self._enabled:
            return
        elapsed = time.monotonic() - self._started
        if self._bar is None:
            if elapsed < SHOW_AFTER_S:
                return
            self._bar = self._open()
        progress, task = self._bar
        rate = f"{num_tokens / elapsed:,.0f} tokens/s"
        progress.update(task, completed=done, rate=rate)

    def _open(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (
            TextColumn("Generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
        )
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        progress.start()
        return progress, progress.add_task("generate", total=self._total, rate="")
