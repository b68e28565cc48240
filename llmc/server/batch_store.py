"""Files and batches on disk, in the folder of --batch-dir.

    files/<id>.data, files/<id>.json           a file, and what is known of it
    batches/<id>.json                          a batch, as its caller sees it
    batches/<id>.output, batches/<id>.errors   rows that are there so far

Everything but the last two is written aside and renamed, so that whatever is there is whole. A file
or batch belongs to the API key that made it.
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

from llmc.errors import ConfigError
from llmc.server.errors import ApiError

MAX_FILE_BYTES = 100 * 2**20
MAX_FOLDER_BYTES = 4 * 2**30  # of all files
MAX_FILES = 1000
MAX_BATCHES = 1000
MAX_LINES = 50_000  # requests of a batch
MAX_LINE_BYTES = 8 * 2**20
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
T = TypeVar("T", "StoredFile", "Batch")

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"
]
ENDED = ("failed", "completed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    id: str
    name: str
    purpose: str
    num_bytes: int
    created_ns: int
    caller: str = ""  # the digest of the key it was made with


@dataclass(slots=True, kw_only=True)
class Batch:
    """Changed by its runner alone, which saves it after every change."""

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
    times: dict[str, int] = field(default_factory=dict)  # by status, as it was reached
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_over(self) -> bool:
        return self.status in ENDED

    def reach(self, status: Status) -> None:
        self.status = status
        self.times.setdefault(status, int(time.time()))  # a date for clients, as created_at


class BatchStore:
    """One server at a time uses a folder; ConfigError for another one, or where it can't write."""

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
            for path in folder.glob(".new-*"):  # of a server that was killed
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.close()

    # Files

    @contextlib.contextmanager
    def new_file(self, purpose: str, caller: str) -> Iterator[NewFile]:
        """A file to be written; it is there once `keep` was called. ApiError 400 where there is no
        room."""
        self._check_room()
        with tempfile.NamedTemporaryFile(dir=self._files, prefix=".new-", delete=False) as aside:
            try:
                yield NewFile(file=aside, purpose=purpose, caller=caller)
            finally:
                Path(aside.name).unlink(missing_ok=True)  # nothing, once it was kept

    def keep(self, new: NewFile, name: str) -> StoredFile:
        new.file.flush()
        os.fsync(new.file.fileno())
        return self._keep(Path(new.file.name), name=name, purpose=new.purpose, caller=new.caller)

    def _keep(
        self, aside: Path, *, name: str, purpose: str, caller: str, file_id: str | None = None
    ) -> StoredFile:
        stored = StoredFile(
            id=file_id or _new_id("file"),
            name=name,
            purpose=purpose,
            num_bytes=aside.stat().st_size,
            created_ns=time.time_ns(),
            caller=caller,
        )
        os.replace(aside, self.data(stored))
        _write(self._files / f"{stored.id}.json", asdict(stored))
        return stored

    def _check_room(self) -> None:
        found = [p.stat().st_size for p in self._files.glob("*.data")]
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
        """ApiError 404 where there is none, or it is another caller's."""
        return _owned(self._load(self._files, file_id, StoredFile), file_id, caller, param)

    def files(self, caller: str) -> list[StoredFile]:
        """Newest first."""
        return self._all(self._files, StoredFile, caller)

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
                400, f"{MAX_BATCHES} batches are not over yet; try again later", code="queue_full"
            )
        (self._batches / f"{over[-1].id}.json").unlink(missing_ok=True)

    def save(self, batch: Batch, *, is_durable: bool = True) -> None:
        """`is_durable`: it is on disk when this returns, which may take a while."""
        _write(self._batches / f"{batch.id}.json", asdict(batch), is_durable=is_durable)

    def batch(self, batch_id: str, caller: str) -> Batch:
        """ApiError 404 where there is none, or it is another caller's."""
        return _owned(self._load(self._batches, batch_id, Batch), batch_id, caller)

    def batches(self, caller: str | None = None) -> list[Batch]:
        """Newest first; None: everyone's."""
        return self._all(self._batches, Batch, caller)

    def rows(self, batch: Batch, kind: Literal["output", "errors"]) -> Path:
        """Where its rows are gathered."""
        return self._batches / f"{batch.id}.{kind}"

    def finish_rows(self, batch: Batch, kind: Literal["output", "errors"]) -> str | None:
        """What was gathered becomes a file; its id, or None where there is no row."""
        path = self.rows(batch, kind)
        # the same at every call: a server may have ended between the two lines that rename
        file_id = _id_of("file", f"{batch.id}/{kind}")
        if not path.is_file():
            kept = (self._files / f"{file_id}.data").is_file()
            path = self._files / f"{file_id}.data" if kept else path
        if not path.is_file() or not path.stat().st_size:
            path.unlink(missing_ok=True)
            return None
        name = f"{batch.id}_{kind}.jsonl"
        return self._keep(
            path, name=name, purpose="batch_output", caller=batch.caller, file_id=file_id
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
    """A file that arrives."""

    file: IO[bytes]
    purpose: str
    caller: str


def new_batch(
    *, input_file_id: str, endpoint: str, metadata: dict[str, str] | None, caller: str
) -> Batch:
    made = Batch(
        id=_new_id("batch"),
        input_file_id=input_file_id,
        endpoint=endpoint,
        completion_window="24h",
        created_ns=time.time_ns(),
        metadata=metadata,
        caller=caller,
    )
    made.reach("validating")
    return made


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _id_of(kind: str, text: str) -> str:
    return f"{kind}-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _owned(found: T | None, name: str, caller: str, param: str | None = None) -> T:
    if found is None or found.caller != caller:
        kind = "batch" if name.startswith("batch") else "file"
        raise ApiError(404, f"there is no {kind} {name[:80]!r} here", param=param)
    return found


def _write(path: Path, value: dict[str, Any], *, is_durable: bool = True) -> None:
    """Aside, then renamed: whoever reads it, or a server after a crash, finds a whole one."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".new-", delete=False, encoding="utf-8"
    ) as aside:
        json.dump(value, aside)
        aside.flush()
        if is_durable:
            os.fsync(aside.fileno())
    os.replace(aside.name, path)
