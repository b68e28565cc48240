"""Files and batches on disk, in the folder of --batch-dir.

    files/<id>.data, files/<id>.json           a file and its metadata
    batches/<id>.json                          a batch, as its caller sees it
    batches/<id>.output, batches/<id>.errors   the rows written so far

Everything but the last two is written to a temporary file and renamed, so that a file is always
complete. A file or batch belongs to the API key that created it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from llmc.cache_dir import write_atomically
from llmc.errors import ConfigError
from llmc.server.errors import ApiError

MAX_FILE_BYTES = 100 * 2**20
MAX_FOLDER_BYTES = 4 * 2**30  # of all files
MAX_FILES = 1000
MAX_BATCHES = 1000
MAX_LINES = 50_000  # requests of a batch
MAX_LINE_BYTES = 8 * 2**20
WINDOW_S = 24 * 3600  # of a batch; lines not answered by then expire
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
T = TypeVar("T", "StoredFile", "Batch")

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled",
    "expired",
]  # fmt: skip
ENDED = ("failed", "completed", "cancelled", "expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    id: str
    name: str
    purpose: str
    num_bytes: int
    created_ns: int
    caller: str = ""  # the digest of the key it was made with
    expires_s: int | None = None  # Unix time; the file is deleted after it

    @property
    def has_expired(self) -> bool:
        return self.expires_s is not None and self.expires_s <= time.time()


@dataclass(slots=True, kw_only=True)
class Batch:
    """Only its runner changes it, and saves it after every change."""

    id: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_ns: int
    caller: str = ""
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)  # of its lines, when it failed
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: dict[str, int] = field(default_factory=dict)  # when each status was reached
    total: int = 0
    completed: int = 0
    failed: int = 0
    keep_output_s: int | None = None  # seconds that its output files are kept; None: until deleted

    @property
    def is_over(self) -> bool:
        return self.status in ENDED

    @property
    def expires_s(self) -> int:
        """Unix time, in seconds."""
        return self.created_ns // 10**9 + WINDOW_S

    @property
    def left_s(self) -> float:
        """Seconds until it expires."""
        return self.expires_s - time.time()

    @property
    def has_expired(self) -> bool:
        """True once its window ended, even before its status is `expired`: no more lines run."""
        return "expired" in self.times

    def reach(self, status: Status) -> None:
        self.status = status
        self.note_time(status)

    def note_time(self, status: Status) -> None:
        self.times.setdefault(status, int(time.time()))  # Unix time, like created_at


class BatchStore:
    """Files and batches in one folder, locked by one server at a time.

    ConfigError if another server holds the lock or the folder can't be written.
    """

    def __init__(self, root: Path) -> None:
        self._files, self._batches = root / "files", root / "batches"
        try:
            for folder in (self._files, self._batches):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open(root / "lock", "wb")  # noqa: SIM115 - held as long as the store
        except OSError as error:
            raise ConfigError(f"--batch-dir {str(root)!r} can't be used: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(f"--batch-dir {str(root)!r} is in use by another server") from None
        for folder in (self._files, self._batches):
            for path in folder.glob(".new-*"):  # left by a server that was killed
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.close()

    # Files

    @contextlib.contextmanager
    def new_file(self, purpose: str, caller: str) -> Iterator[NewFile]:
        """A temporary file to write to; `keep` makes it permanent. ApiError 400 if there is no
        room."""
        self._check_room()
        with tempfile.NamedTemporaryFile(dir=self._files, prefix=".new-", delete=False) as aside:
            try:
                yield NewFile(file=aside, purpose=purpose, caller=caller)
            finally:
                Path(aside.name).unlink(missing_ok=True)  # a no-op once it was kept

    def keep(self, new: NewFile, name: str, keep_s: int | None = None) -> StoredFile:
        """Make the file permanent. `keep_s`: seconds until it is deleted."""
        new.file.flush()
        os.fsync(new.file.fileno())
        return self._keep(
            Path(new.file.name), name=name, purpose=new.purpose, caller=new.caller, keep_s=keep_s
        )

    def _keep(
        self,
        aside: Path,
        *,
        name: str,
        purpose: str,
        caller: str,
        keep_s: int | None,
        file_id: str | None = None,
    ) -> StoredFile:
        now_ns = time.time_ns()
        stored = StoredFile(
            id=file_id or _new_id("file"),
            name=name,
            purpose=purpose,
            num_bytes=aside.stat().st_size,
            created_ns=now_ns,
            caller=caller,
            expires_s=None if keep_s is None else now_ns // 10**9 + keep_s,
        )
        os.replace(aside, self.data(stored))
        try:
            record = json.dumps(asdict(stored))
            write_atomically(self._files / f"{stored.id}.json", record, is_durable=True)
        except OSError:  # a full disk: without its record nobody could delete it
            self.data(stored).replace(aside)
            raise
        return stored

    def _check_room(self) -> None:
        self._delete_expired(self._all(self._files, StoredFile))
        found = [p.stat().st_size for p in self._files.glob("*.data")]
        found += [MAX_FILE_BYTES for _ in self._files.glob(".new-*")]  # being uploaded
        if len(found) >= MAX_FILES or sum(found) + MAX_FILE_BYTES > MAX_FOLDER_BYTES:
            raise ApiError(
                400,
                f"there are {len(found)} files of {sum(found) / 2**20:.0f} MiB, and the limits are "
                f"{MAX_FILES} and {MAX_FOLDER_BYTES / 2**20:.0f} MiB; delete some "
                "(DELETE /v1/files/{id})",
                param="file",
                code="too_many_files",
            )

    def data(self, stored: StoredFile) -> Path:
        return self._files / f"{stored.id}.data"

    def file(self, file_id: str, caller: str, param: str | None = None) -> StoredFile:
        """A file by id; ApiError 404 if there is none or it belongs to another caller."""
        found = self._load(self._files, file_id, StoredFile)
        kept = self._delete_expired([] if found is None else [found])
        return _owned(kept[0] if kept else None, file_id, caller, param)

    def files(self, caller: str) -> list[StoredFile]:
        """Newest first."""
        return self._delete_expired(self._all(self._files, StoredFile, caller))

    def _delete_expired(self, found: list[StoredFile]) -> list[StoredFile]:
        """The files that remain. A file that an unfinished batch reads is not deleted."""
        expired = [one for one in found if one.has_expired]
        if not expired:
            return found
        read = {batch.input_file_id for batch in self.batches() if not batch.is_over}
        gone = {one.id for one in expired if one.id not in read}
        for one in expired:
            if one.id in gone:
                self.delete(one)
        return [one for one in found if one.id not in gone]

    def delete(self, stored: StoredFile) -> None:
        (self._files / f"{stored.id}.json").unlink(missing_ok=True)
        self.data(stored).unlink(missing_ok=True)

    # Batches

    def add(self, batch: Batch) -> None:
        if len(list(self._batches.glob("*.json"))) >= MAX_BATCHES:
            self._forget_oldest()
        self.save(batch)

    def _forget_oldest(self) -> None:
        over = [batch for batch in self._all(self._batches, Batch) if batch.is_over]
        if not over:
            raise ApiError(
                400, f"{MAX_BATCHES} batches are unfinished; try again later", code="queue_full"
            )
        (self._batches / f"{over[-1].id}.json").unlink(missing_ok=True)

    def save(self, batch: Batch, *, is_durable: bool = True) -> None:
        """Write the batch. `is_durable`: fsync before returning, which may take a while."""
        path = self._batches / f"{batch.id}.json"
        write_atomically(path, json.dumps(asdict(batch)), is_durable=is_durable)

    def batch(self, batch_id: str, caller: str) -> Batch:
        """A batch by id; ApiError 404 if there is none or it belongs to another caller."""
        return _owned(self._load(self._batches, batch_id, Batch), batch_id, caller)

    def batches(self, caller: str | None = None) -> list[Batch]:
        """Newest first; with caller None, those of all callers."""
        return self._all(self._batches, Batch, caller)

    def rows(self, batch: Batch, kind: Literal["output", "errors"]) -> Path:
        """The file to which the batch's rows are appended."""
        return self._batches / f"{batch.id}.{kind}"

    def gathered(self, batch: Batch, kind: Literal["output", "errors"]) -> Path:
        """Where its rows are now: a server may have stopped after turning them into a file."""
        path = self.rows(batch, kind)
        kept = self._files / f"{_rows_id(batch, kind)}.data"
        return kept if kept.is_file() and not path.is_file() else path

    def finish_rows(self, batch: Batch, kind: Literal["output", "errors"]) -> str | None:
        """Turn the rows into a stored file; returns its id, or None if there are no rows."""
        path = self.gathered(batch, kind)
        if not path.is_file() or not path.stat().st_size:
            path.unlink(missing_ok=True)
            return None
        return self._keep(
            path,
            name=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            caller=batch.caller,
            keep_s=batch.keep_output_s,
            file_id=_rows_id(batch, kind),
        ).id

    # Both

    def _load(self, folder: Path, name: str, kind: type[T]) -> T | None:
        if not _ID.fullmatch(name):
            return None
        try:
            return kind(**json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _all(self, folder: Path, kind: type[T], caller: str | None = None) -> list[T]:
        found = [self._load(folder, path.stem, kind) for path in folder.glob("*.json")]
        owned = [one for one in found if one is not None and caller in (None, one.caller)]
        return sorted(owned, key=lambda one: (one.created_ns, one.id), reverse=True)


@dataclass(slots=True, kw_only=True)
class NewFile:
    """A file that is being uploaded."""

    file: IO[bytes]
    purpose: str
    caller: str


def new_batch(
    *,
    input_file_id: str,
    endpoint: str,
    metadata: dict[str, str] | None,
    caller: str,
    keep_output_s: int | None = None,
) -> Batch:
    made = Batch(
        id=_new_id("batch"),
        input_file_id=input_file_id,
        endpoint=endpoint,
        completion_window="24h",
        created_ns=time.time_ns(),
        metadata=metadata,
        caller=caller,
        keep_output_s=keep_output_s,
    )
    made.reach("validating")
    return made


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _rows_id(batch: Batch, kind: str) -> str:
    """The id of the batch's result file; deterministic, so a restart finds the same file."""
    text = f"{batch.id}/{kind}"
    return f"file-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _owned(found: T | None, name: str, caller: str, param: str | None = None) -> T:
    if found is None or found.caller != caller:
        kind = "batch" if name.startswith("batch") else "file"
        raise ApiError(404, f"there is no {kind} {name[:80]!r}", param=param)
    return found
