"""Runs the batches of a store one at a time, alongside interactive requests.

validating -> in_progress -> finalizing -> completed        cancel: cancelling -> cancelled
     |-> failed (a line is invalid)      |-> expired (its window ended before its last answer)

Rows are appended as they arrive. If the server stops or is killed, its batch stays on disk; the
next server on the same folder drops a partial row, skips lines that have a row, and continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal

from pydantic_core import from_json
from starlette.applications import Starlette

from llmc.errors import EngineDeadError
from llmc.server.batch_lines import BatchCaller, BatchLine, Row, error_row, parse_line
from llmc.server.batch_store import MAX_LINE_BYTES, MAX_LINES, Batch, BatchStore
from llmc.server.errors import ApiError, error_body

log = logging.getLogger(__name__)

MAX_ERRORS = 20  # lines that a failed batch names
_DISK_RETRY_S = 5.0
SAVE_S = 2.0  # between two saves of a batch's counts
CLOCK_S = 60.0  # between two checks of the wall clock, which may jump
EXPIRED = ApiError(
    400,
    "This request could not be executed before the completion window expired.",
    code="batch_expired",
)
_KINDS: tuple[Literal["output", "errors"], ...] = ("output", "errors")


class BatchRunner:
    """Call `start` when the server is ready and `stop` before it shuts down."""

    def __init__(self, app: Starlette, store: BatchStore, *, salt_by_api_key: bool) -> None:
        self._app = app
        self._store = store
        self._salt_by_api_key = salt_by_api_key
        self._current: Batch | None = None
        self._work: asyncio.Task[None] | None = None  # of the current batch
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._at_once = max(1, app.state.llm.num_rows // 2)

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Signal that a batch was added."""
        self._wake.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._store.close()

    def current(self, batch: Batch) -> Batch:
        """The batch with its counts as of now."""
        current = self._current
        return current if current is not None and current.id == batch.id else batch

    def cancel(self, batch: Batch) -> Batch:
        """Cancel a batch; rows already written are kept. ApiError 400 if it is over."""
        batch = self.current(batch)
        if batch.is_over or batch.status == "finalizing":
            raise ApiError(400, f"the batch is {batch.status} and can't be cancelled")
        batch.reach("cancelling")
        self._store.save(batch)
        if batch is self._current and self._work is not None:
            self._work.cancel()
        else:
            self._wake.set()
        return batch

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                known = await asyncio.to_thread(self._store.batches)
                todo = [batch for batch in known if not batch.is_over]
                if not todo:
                    await self._wake.wait()
                    continue
                oldest = self._store.batch(todo[-1].id, todo[-1].caller)  # may be cancelled by now
                if not await self._end(oldest):
                    return
            except (OSError, ApiError) as error:
                log.error("batches can't continue now and will be retried: %s", error)
                await asyncio.sleep(_DISK_RETRY_S)

    async def _end(self, batch: Batch) -> bool:
        """Run a batch to its end; False if the server shuts down first."""
        self._current = batch
        self._work = asyncio.create_task(self._advance(batch))
        try:
            await asyncio.wait({self._work})
            if not self._work.cancelled() and (error := self._work.exception()) is not None:
                if isinstance(error, EngineDeadError):
                    return False
                if isinstance(error, OSError):  # a full disk is not the batch's fault
                    raise error
                log.error("batch %s failed", batch.id, exc_info=error)
                batch.errors = [{"code": "internal_error", "message": "the server failed on it"}]
                batch.reach("failed")
                self._store.save(batch)
            elif batch.status == "cancelling":
                self._finish(batch)
                batch.reach("cancelled")
                self._store.save(batch)
        finally:
            self._work.cancel()
            await asyncio.wait({self._work})  # it writes to the store, which may be closed next
            self._current = self._work = None
        return True

    async def _advance(self, batch: Batch) -> None:
        if batch.status == "cancelling":
            return
        if batch.status == "validating":
            await asyncio.to_thread(self._validate, batch)
            batch.reach("failed" if batch.errors else "in_progress")
            self._store.save(batch)
        if batch.status == "in_progress":
            if not await self._answer_in_time(batch):
                batch.note_time("expired")  # saved now, in case the server stops before the end
            batch.reach("finalizing")
            self._store.save(batch)
        if batch.status == "finalizing":
            if batch.has_expired:
                await asyncio.to_thread(self._give_up, batch)
            self._finish(batch)
            batch.reach("expired" if batch.has_expired else "completed")
            self._store.save(batch)

    def _validate(self, batch: Batch) -> None:
        """Check all lines before the first one runs."""
        seen: set[str] = set()
        try:
            for number, raw in self._raw_lines(batch):
                if len(batch.errors) >= MAX_ERRORS:
                    break
                try:
                    line = parse_line(number, raw, (batch.endpoint,))
                    if line.custom_id in seen:
                        raise ApiError(
                            400,
                            f"line {number}: custom_id {line.custom_id[:80]!r} was already used",
                            param="custom_id",
                        )
                    seen.add(line.custom_id)
                except ApiError as error:
                    shown = error_body(error)["error"]
                    batch.errors.append(
                        {
                            "code": shown["code"],
                            "message": shown["message"],
                            "param": error.param,
                            "line": number,
                        }
                    )
        except ApiError as error:
            batch.errors.append({"code": error.code or "invalid_value", "message": error.message})
        batch.total = len(seen)
        if not seen and not batch.errors:
            batch.errors.append({"code": "empty_file", "message": "the file has no requests"})

    def _raw_lines(self, batch: Batch) -> Iterator[tuple[int, bytes]]:
        """Non-blank lines with their numbers; ApiError for a file that exceeds the limits."""
        count = 0
        stored = self._store.file(batch.input_file_id, batch.caller)
        try:
            with self._store.data(stored).open("rb") as file:
                for number in range(1, 2 * MAX_LINES):
                    raw = file.readline(MAX_LINE_BYTES + 1)
                    if not raw:
                        return
                    count += bool(raw.strip())
                    if len(raw) > MAX_LINE_BYTES or count > MAX_LINES:
                        break
                    if raw.strip():
                        yield number, raw
        except FileNotFoundError:
            raise ApiError(404, "the input file was deleted") from None
        raise ApiError(
            400,
            f"a batch has at most {MAX_LINES} lines of at most {MAX_LINE_BYTES} bytes",
            code="batch_too_large",
        )

    async def _answer_in_time(self, batch: Batch) -> bool:
        """Run the remaining lines; False if the batch's window ended before the last answer."""
        answering = asyncio.create_task(self._answer(batch))
        try:
            while not answering.done():
                if batch.left_s <= 0:
                    return False
                await asyncio.wait({answering}, timeout=min(batch.left_s, CLOCK_S))
            answering.result()
            return True
        finally:
            answering.cancel()
            await asyncio.wait({answering})
            if not answering.cancelled():
                answering.exception()  # mark it retrieved: an abandoned task's would be logged

    def _answered(self, batch: Batch) -> set[str]:
        """The ids of the lines that have a row. Sets the batch's counts from these rows.

        Takes long for many rows, so it must not run in the event loop.
        """
        done = [_custom_ids(self._store.gathered(batch, kind)) for kind in _KINDS]
        batch.completed, batch.failed = map(len, done)
        return set[str]().union(*done)

    def _open_lines(self, batch: Batch, answered: set[str]) -> Iterator[BatchLine]:
        """The lines without a row."""
        for number, raw in self._raw_lines(batch):
            line = parse_line(number, raw, (batch.endpoint,))
            if line.custom_id not in answered:
                yield line

    def _give_up(self, batch: Batch) -> None:
        """Write an "expired" row for each line that has no row."""
        left = [line.custom_id for line in self._open_lines(batch, self._answered(batch))]
        if not left:
            return
        with self._store.rows(batch, "errors").open("ab") as errors:
            for custom_id in left:
                errors.write(error_row(custom_id, EXPIRED).text)
        batch.failed += len(left)

    async def _answer(self, batch: Batch) -> None:
        """Run the lines without a row."""
        state = {"caller": batch.caller} if batch.caller else {}
        if batch.caller and self._salt_by_api_key:
            state["cache_owner"] = batch.caller
        caller = BatchCaller(self._app, state, at_once=self._at_once)
        lines = self._open_lines(batch, await asyncio.to_thread(self._answered, batch))
        with (
            self._store.rows(batch, "output").open("ab") as output,
            self._store.rows(batch, "errors").open("ab") as errors,
        ):
            await caller.run(lines, self._appender(batch, output, errors))

    def _appender(
        self, batch: Batch, output: IO[bytes], errors: IO[bytes]
    ) -> Callable[[Row], None]:
        loop = asyncio.get_running_loop()
        saved = loop.time()

        def append(row: Row) -> None:
            nonlocal saved
            file = errors if row.is_error else output
            file.write(row.text)
            file.flush()
            if row.is_error:
                batch.failed += 1
            else:
                batch.completed += 1
            if loop.time() - saved > SAVE_S:  # counts only; they are recounted after a crash
                self._store.save(batch, is_durable=False)
                saved = loop.time()

        return append

    def _finish(self, batch: Batch) -> None:
        batch.output_file_id = self._store.finish_rows(batch, "output") or batch.output_file_id
        batch.error_file_id = self._store.finish_rows(batch, "errors") or batch.error_file_id


def _custom_ids(path: Path) -> set[str]:
    """The ids of the rows written so far; a partial row at the end is truncated."""
    found: set[str] = set()
    if not path.is_file():
        return found
    whole = 0
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            found.add(from_json(raw)["custom_id"])
            whole += len(raw)
    if whole < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(whole)
    return found
