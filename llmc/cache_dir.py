"""The folder for everything that llmc keeps between runs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmc.errors import ConfigError

STALE_S = 3600.0  # no writer takes this long between two files of a folder
_NEW = ".new-"
_LEFT = (f"{_NEW}*", "tmp????????")  # the latter are those of earlier versions


def cache_dir() -> Path:
    """The folder for everything that is compiled: $LLMC_CACHE_DIR, else ~/.cache/llmc.

    Raises ConfigError if either is in the home of an unknown user."""
    given = os.environ.get("LLMC_CACHE_DIR")
    try:
        return Path(given).expanduser() if given else Path.home() / ".cache" / "llmc"
    except RuntimeError as error:  # an unknown user, or no home
        raise ConfigError(f"LLMC_CACHE_DIR={given or ''}: {error}") from error


def files_digest(files: Iterable[Path]) -> str:
    """128-bit digest of the files' contents, for the key of what depends on them."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def write_atomically(path: Path, text: str, *, is_durable: bool = False) -> None:
    """Write a file next to `path` and rename it, so that a reader never sees a partial one; create
    its folder as private. `is_durable`: fsync before returning, which may take a while.

    Raises OSError if the disk is full or not writable, and leaves nothing behind then.
    """
    import tempfile  # late: most callers of this module write nothing

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=_NEW, delete=False, encoding="utf-8"
    ) as aside:
        try:
            aside.write(text)
            aside.flush()
            if is_durable:
                os.fsync(aside.fileno())
            os.replace(aside.name, path)
        except OSError:
            os.unlink(aside.name)
            raise


@contextlib.contextmanager
def new_folder(parent: Path) -> Iterator[Path]:
    """A private folder inside `parent`, to be renamed when it is complete; otherwise it is removed.
    Also removes what processes that were killed have left there.

    Raises OSError if the disk is full or not writable.
    """
    import shutil
    import tempfile

    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_left(parent)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=_NEW))
    try:
        lock = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some file systems have no locks; the age counts
                fcntl.flock(lock, fcntl.LOCK_SH)
            yield folder
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish_folder(folder: Path, made: Path) -> None:
    """Rename a complete folder to `made`, unless another process was faster. Raises OSError."""
    try:
        os.rename(folder, made)
    except OSError:
        if not made.is_dir():
            raise


def _remove_left(parent: Path) -> None:
    import shutil

    for path in (path for pattern in _LEFT for path in parent.glob(pattern)):
        with contextlib.suppress(OSError):  # its writer has just finished, or it is not ours
            if time.time() - path.stat().st_mtime > STALE_S and not _is_locked(path):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def _is_locked(path: Path) -> bool:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
