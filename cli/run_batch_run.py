"""`llmc run-batch` after flag parsing: load, answer every line, rename the finished output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from llmc.async_llm import AsyncLLM
from llmc.cli.console import note, stderr_console
from llmc.cli.loading import load_async_llm
from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.frontend.progress import GenerationProgress
from llmc.server.app import create_app
from llmc.server.batch_lines import BatchCaller, BatchLine, Row, error_row, parse_line
from llmc.server.errors import ApiError
from llmc.server.settings import ServerSettings


def run(config: EngineConfig, source: Path, target: Path) -> None:
    """Run the batch; raises ConfigError if the files can't be read or written."""
    try:
        with source.open("rb") as file:
            total = sum(1 for line in file if line.strip())
        with _written_whole(target) as out:
            console = stderr_console()
            llm = load_async_llm(config, console)
            failed = asyncio.run(_answer(llm, source, out, total))
    except OSError as error:
        raise ConfigError(f"{error.filename or target}: {error.strerror or error}") from None
    note(console, f"{total - failed} answered, {failed} failed: {target}")


@contextlib.contextmanager
def _written_whole(target: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces `target` if the block succeeds."""
    with tempfile.NamedTemporaryFile(
        dir=target.parent, prefix=f".{target.name}.", delete=False
    ) as out:
        try:
            yield out
            out.flush()
            os.fsync(out.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(out.name, 0o666 & ~mask)
            os.replace(out.name, target)
        except BaseException:
            os.unlink(out.name)
            raise


async def _answer(llm: AsyncLLM, source: Path, out: IO[bytes], total: int) -> int:
    """Answer all lines; returns how many requests failed."""
    failed = done = 0
    app = create_app(llm, ServerSettings(access_log=False, ui=False))
    with source.open("rb") as file, GenerationProgress(total) as bar:

        def on_row(row: Row) -> None:
            nonlocal failed, done
            failed, done = failed + row.is_error, done + 1
            out.write(row.text)
            bar.update(done, llm.stats().num_generated_tokens)

        caller = BatchCaller(app, {}, at_once=2 * llm.config.max_num_seqs)
        try:
            llm.open()
            await caller.run(_lines(file, on_row), on_row)
        finally:
            await llm.shutdown()
    return failed


def _lines(file: IO[bytes], on_row: Callable[[Row], None]) -> Iterator[BatchLine]:
    """Yield the valid requests; for other lines, write error rows."""
    for number, raw in enumerate(file, start=1):
        if not raw.strip():
            continue
        try:
            line = parse_line(number, raw)
        except ApiError as error:
            on_row(error_row(f"line-{number}", error))
        else:
            yield line
